"""A seed determines a draw, tables keep their dtype, and a state dict restores a sampler."""

import copy

import pytest
import torch

from manyclass import ClassCounts, ClassHead
from manyclass.kernels.cpu import build
from manyclass.samplers import Bernoulli, Importance, Systematic, WithExplicit
from tests.tables import SAMPLERS

C = 200
TARGET = torch.arange(9)


def draw(sampler, seed=0):
    candidates = sampler(TARGET, exclude=TARGET.unsqueeze(1), generator=torch.Generator().manual_seed(seed))
    return candidates.ids(), candidates.log_kappa()


def identical(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("group_size", [None, 1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_compiled_and_eager_draws_are_equal(name, group_size, monkeypatch):
    torch.manual_seed(0)
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 20, group_size)
    ids, log_kappa = draw(sampler)
    monkeypatch.setattr(build, "library", lambda: None)
    eager_ids, eager_log_kappa = draw(sampler)
    assert torch.equal(ids, eager_ids)
    # Logarithms may differ in their last bit.
    torch.testing.assert_close(log_kappa, eager_log_kappa, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("group_size", [None, 1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_seed_gives_the_same_draw_and_loss_bit_for_bit(name, group_size):
    torch.manual_seed(0)
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 20, group_size)
    assert identical(draw(sampler), draw(sampler))
    assert identical(draw(sampler), draw(copy.deepcopy(sampler)))
    head = ClassHead(5, C, sampler=sampler)
    hidden, target = torch.randn(9, 5), torch.arange(9)
    first, second = (head(hidden, target, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("exhaustive", "set alone")])
def test_another_seed_gives_another_draw(name):
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 20, None)
    assert any(not identical(draw(sampler, 0), draw(sampler, seed)) for seed in range(1, 5))


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16, lambda m: m.to(torch.float16)])
@pytest.mark.parametrize("name", SAMPLERS)
def test_tables_keep_their_dtype(name, convert):
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 20, None)
    head = ClassHead(5, C, sampler=sampler)
    before = draw(sampler)
    dtypes = {key: value.dtype for key, value in sampler.state_dict().items()}
    head = convert(head)
    assert head.weight.dtype != torch.float32
    assert {key: value.dtype for key, value in head.sampler.state_dict().items()} == dtypes
    after = draw(head.sampler)
    assert after[1].dtype == torch.float64
    assert identical(before, after)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_loaded_state_replaces_other_weights(name):
    torch.manual_seed(0)
    sampler = SAMPLERS[name](torch.rand(C) ** 8 + 1e-6, 20, None)
    other = SAMPLERS[name](torch.rand(C) + 0.1, 20, None)
    other.load_state_dict(sampler.state_dict())
    assert identical(draw(other), draw(sampler))


@pytest.mark.parametrize("make", [Importance, Systematic, Bernoulli, Bernoulli.proportional])
def test_streaming_counts_are_part_of_the_state(make):
    counts = ClassCounts.streaming(C)
    sampler = make(counts, 20)
    counts.update(torch.randint(0, 20, (5000,)))
    sampler.refresh()
    fresh = make(ClassCounts.streaming(C), 20)
    fresh.load_state_dict(sampler.state_dict())
    assert identical(draw(fresh), draw(sampler))
    fresh.refresh()
    assert identical(draw(fresh), draw(sampler))


@pytest.mark.parametrize("make", [Importance, Systematic, Bernoulli, Bernoulli.proportional])
def test_a_sampler_of_counts_can_be_resized(make):
    sampler = WithExplicit(make(ClassCounts(torch.arange(C)), 20), torch.tensor([3, C - 1]))
    sampler.resize(C + 50)
    assert sampler.num_classes == C + 50
    assert sampler(torch.tensor([C + 49])).num_classes == C + 50
    sampler.resize(C - 50)
    ids, _log_kappa = draw(sampler)
    assert ids.max() < C - 50
    assert (ids == 3).any(1).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weights", lambda x: -x, "`weights` must be -1 for at most 20 classes"),
        ("weights", lambda x: x.clamp(min=-0.5), "`weights` must be -1 or not negative, got -0.5 at position 3"),
        ("weights", lambda x: -9 * x.abs(), "`weights` must not be below -1 or NaN"),
        ("weights", lambda x: x * torch.nan, "`weights` must not be below -1 or NaN"),
        ("weights", lambda x: x[:-1], "`weights` must be torch.float64"),
        ("weights", lambda x: x.float(), "`weights` must be torch.float64"),
        ("weights", lambda x: x.expand(2, -1), "`weights` must be torch.float64"),
        ("weights", lambda x: x.where(x > 9, 1e300), "`weights` must have a sum between"),
        ("weights", lambda x: x.abs() * torch.inf, "`weights` must have a sum between"),
        ("weights", lambda x: -torch.ones_like(x), "`weights` must be -1 for at most 20 classes"),
        ("line", lambda x: x[:-1], "`line` must be torch.int32"),
        ("line", lambda x: torch.zeros_like(x), "`line` must hold each of"),
        ("line", lambda x: x - 1, "`line` must not be below 0"),
        ("order.progress", lambda x: x - 10, "`progress` must not be below 0"),
        ("order.labels", lambda x: torch.ones(C, dtype=torch.int16), "`labels` must be torch.int16 \\[0\\]"),
        ("source.weights.raw", lambda x: x * torch.inf, "`raw` must"),
    ],
)
def test_damaged_tables_are_refused(name, change, message):
    weights = torch.rand(C, generator=torch.Generator().manual_seed(0))
    weights[3] = 1000
    sampler = Systematic(weights, 20, order="random")
    state = sampler.state_dict()
    state[name] = change(state[name])
    before = draw(sampler)
    with pytest.raises(RuntimeError, match=message):
        sampler.load_state_dict(state)
    assert identical(draw(sampler), before)
