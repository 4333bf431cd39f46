"""Tailored: a draw that is made for its batch, unbiased however wrong the sketch of its probabilities is."""

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.samplers import Systematic, Tailored, WithExplicit
from manyclass.samplers._scan import largest_log_p
from manyclass.samplers._sketch import Sketch
from manyclass.samplers._teeth import Teeth

C, D, B = 8, 3, 7
COUNTS = torch.tensor([5.0, 1.0, 2.0, 0.5, 9.0, 1.0, 1.0, 3.0], dtype=torch.float64)
TARGET = torch.tensor([1, 3, 0, 3, 7, 2, 5])
EXCLUDE = torch.tensor([[1, -1], [3, 4], [0, -1], [3, 3], [7, 0], [2, 6], [5, -1]])
SKETCHES = {
    "full rank": lambda generator: torch.zeros(D, D),
    "rank 1": lambda generator: torch.nn.functional.pad(torch.randn(D, 1, generator=generator), (0, D - 1)),
    "random": lambda generator: 3 * torch.randn(D, D, generator=generator),
    "nearly 0": lambda generator: torch.full((D, D), 1e-30),
}


def model(sampler, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    vectors = sharpness * torch.randn(C, D, generator=generator)
    sampler.attach(vectors, torch.randn(C, generator=generator))
    return vectors, torch.randn(B, D, generator=generator)


def innermost(sampler):
    return innermost(sampler.sampler) if isinstance(sampler, WithExplicit) else sampler


def sums(sampler, hidden, g):
    """Return the expectation of Σ κ g [B], over all outcomes of the random offsets."""
    inner = innermost(sampler)
    pi = inner.teeth.inclusion(inner.proposal(hidden, -(-B // (inner.group_size or B)))[0])
    # The classes that are drawn change where a tooth passes the end of a class.
    edges = sorted({0.0, 1.0, *(pi.cumsum(1) % 1).flatten().tolist()})
    total = torch.zeros(B, dtype=torch.float64)
    for low, high in itertools.pairwise(edges):

        def uniform(*size, dtype, value=(low + high) / 2, **_):
            return torch.full(size, value, dtype=dtype)

        with patch("torch.rand", uniform):
            candidates = sampler(TARGET, hidden=hidden, exclude=EXCLUDE)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        total += (high - low) * (kappa * g[candidates.ids()]).sum(1)
    return total


def check_unbiased(sampler, hidden):
    g = torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    kept = torch.ones(B, C + 1, dtype=torch.float64).scatter_(1, EXCLUDE % (C + 1), 0.0)[:, :C]
    torch.testing.assert_close(sums(sampler, hidden, g), kept @ g, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("nearest", [0, 2, C])
@pytest.mark.parametrize("mix", [0.02, 1.0])
@pytest.mark.parametrize("group_size", [None, 1, 2, 3])
@pytest.mark.parametrize("k", [1, 3, C])
def test_sums_over_all_outcomes_are_unbiased(k, group_size, mix, nearest):
    sampler = Tailored(COUNTS, k, group_size=group_size, mix=mix, nearest=nearest)
    _, hidden = model(sampler)
    check_unbiased(sampler, hidden)
    check_unbiased(sampler, None)


@pytest.mark.parametrize("nearest", [0, 3])
@pytest.mark.parametrize("explicit", ["batch", torch.tensor([4, 6])])
def test_sums_are_unbiased_beside_an_explicit_set(explicit, nearest):
    sampler = WithExplicit(Tailored(COUNTS, 2, group_size=3, nearest=nearest), explicit)
    _, hidden = model(sampler)
    check_unbiased(sampler, hidden)


@pytest.mark.parametrize("name", SKETCHES)
def test_sums_are_unbiased_with_any_sketch(name):
    sampler = Tailored(COUNTS, 3, group_size=3)
    vectors, hidden = model(sampler)
    sampler.sketch = Sketch(SKETCHES[name](torch.Generator().manual_seed(4)))
    check_unbiased(sampler, hidden)
    # Class vectors that have changed since the sketch was made are read at the next draw.
    before = sampler.proposal(hidden, 1)[0].clone()
    vectors.neg_()
    check_unbiased(sampler, hidden)
    assert name == "nearly 0" or not torch.equal(sampler.proposal(hidden, 1)[0], before)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def tolerance(request, monkeypatch):
    """Run a test with scans in both dtypes; return the tolerance of weights."""
    monkeypatch.setattr("manyclass.samplers.tailored.scan_dtype", lambda weight: request.param)
    return {"rtol": 0.03 if request.param == torch.bfloat16 else 1e-5, "atol": 1e-6}


def test_the_weights_are_the_largest_probability_in_the_group_and_a_share_of_the_frequencies(kernels, tolerance):
    sampler = Tailored(COUNTS, 3, group_size=3, mix=0.1)
    vectors, hidden = model(sampler)
    bias = sampler.schedule.vectors[1]
    weight, _ = sampler.proposal(hidden, 3)
    for group, examples in enumerate(hidden.split(3)):
        largest = (examples @ vectors.T + bias).double().softmax(1).amax(0)
        expected = 0.9 * largest / largest.sum() + 0.1 * COUNTS / COUNTS.sum()
        torch.testing.assert_close(weight[group], expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scans_of_any_size_share_no_scores(dtype):
    generator = torch.Generator().manual_seed(0)
    for examples, classes in ((5, 40), (2, 7), (9, 80), (5, 40)):
        query, rows = (torch.randn(n, 4, generator=generator).to(dtype) for n in (examples, classes))
        with torch.inference_mode(classes == 40):
            found, _ = largest_log_p(query, rows, None, 0, examples)
        expected = (query @ rows.T).float().log_softmax(1).amax(0)
        torch.testing.assert_close(found[0], expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("nearest", [0, 2, 5])
def test_a_scan_in_parts_gives_the_same_weights_and_nearest_classes(monkeypatch, nearest, kernels):
    sampler = Tailored(COUNTS, 3, nearest=nearest).without(torch.tensor([2]))
    _, hidden = model(sampler)
    weight, ids = sampler.proposal(hidden, 1)
    monkeypatch.setattr("manyclass.samplers._scan.MAX_SCORES", 3 * C)
    parts = sampler.proposal(hidden, 1)
    torch.testing.assert_close(parts[0], weight, rtol=1e-6, atol=1e-9)
    assert torch.equal(parts[1], ids) if nearest else parts[1] is None


@pytest.mark.parametrize("group_size", [None, 3])
def test_the_nearest_classes_of_each_example_are_explicit_and_left_to_no_draw(group_size, kernels, tolerance):
    sampler = Tailored(COUNTS, 3, group_size=group_size, nearest=3, mix=0.1)
    vectors, hidden = model(sampler)
    scores = hidden @ vectors.T + sampler.schedule.vectors[1]
    top = scores.topk(3).indices
    candidates = sampler(TARGET, hidden=hidden, exclude=EXCLUDE)
    excluded = (top.unsqueeze(2) == EXCLUDE.unsqueeze(1)).any(2)
    assert excluded.any()
    assert torch.equal(candidates.included, top.masked_fill(excluded, -1))
    # An example that sums a class itself does not ask for it.
    size = group_size or B
    weight, _ = sampler.proposal(hidden, -(-B // size))
    for found, log_p, own in zip(weight, scores.double().log_softmax(1).split(size), top.split(size), strict=True):
        largest = log_p.exp().scatter(1, own, 0.0).amax(0)
        expected = 0.9 * largest / largest.sum() + 0.1 * COUNTS / COUNTS.sum()
        torch.testing.assert_close(found, expected, **tolerance)


def test_there_are_fewer_nearest_classes_if_fewer_are_drawn(kernels):
    sampler = Tailored(COUNTS, 3, nearest=C - 1).without(torch.tensor([0, 4]))
    _, hidden = model(sampler)
    included = sampler(TARGET, hidden=hidden).included
    assert (included[:, -1] == -1).all()
    assert not torch.isin(included, torch.tensor([0, 4])).any()


@pytest.mark.parametrize("k", [1, 7, 100, 999])
def test_inclusion_probabilities_are_exact_multiples_and_sum_to_nearly_k(k):
    generator = torch.Generator().manual_seed(k)
    weight = torch.rand(3, 1000, dtype=torch.float64, generator=generator).pow(8)
    weight[:, 10] = 0.0
    teeth = Teeth(k, 999, torch.device("cpu"))
    pi = teeth.inclusion(weight)
    assert ((pi > 0) == (weight > 0)).all()
    assert (pi <= 1).all()
    assert (pi.sum(1) <= k).all()
    torch.testing.assert_close(pi.sum(1), torch.full((3,), float(k), dtype=torch.float64), rtol=1e-6, atol=0)
    # Exact in any order of summation.
    assert torch.equal(pi.sum(1), pi.flip(1).cumsum(1)[:, -1])
    certain = pi == 1
    for seed in range(20):
        place, log_kappa = teeth.draw(pi, torch.Generator().manual_seed(seed))
        assert (log_kappa >= 0).all()
        for row, drawn in zip(place, certain, strict=True):
            assert len(row.unique()) == k
            assert torch.isin(drawn.nonzero().squeeze(1), row).all()


def test_targets_know_their_inclusion_probability():
    sampler = Tailored(COUNTS, 3, group_size=3)
    _, hidden = model(sampler)
    candidates = sampler(TARGET, hidden=hidden)
    pi = sampler.teeth.inclusion(sampler.proposal(hidden, 3)[0])
    group = torch.arange(B) // 3
    torch.testing.assert_close((-candidates.target_log_kappa()).exp(), pi[group, TARGET])


def sharp(classes=2000, dim=16, batch=128):
    """Return a head and a batch, each example of which is nearly sure of a class that is not its target."""
    torch.manual_seed(0)
    head = ClassHead(dim, classes, bias=False, sampler=Tailored(torch.ones(classes), 256))
    with torch.no_grad():
        head.weight.copy_(6 * torch.nn.functional.normalize(torch.randn(classes, dim), dim=1))
    likely, target = torch.randint(classes, (2, batch))
    return head, head.weight.detach()[likely] * 0.5, target


def test_the_error_on_a_sharp_problem_is_far_below_that_of_systematic_sampling():
    head, hidden, target = sharp()
    errors = []
    for sampler in (head.sampler, Systematic(torch.ones(head.num_classes), 256)):
        head.use(sampler)
        errors.append(diagnose(head, hidden, target, generator=torch.Generator().manual_seed(0)).rmse_log_z)
    assert errors[0] < 0.2 * errors[1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_head_with_cosine_similarity_scores_its_proposal_by_it(wrapped):
    sampler = Tailored(COUNTS, 3, mix=0.1)
    head = ClassHead(D, C, sampler=WithExplicit(sampler, "batch") if wrapped else sampler, similarity="cosine", scale=5)
    with torch.no_grad():
        head.weight.mul_(torch.arange(1.0, C + 1).unsqueeze(1))
        hidden = 20 * torch.randn(B, D, generator=torch.Generator().manual_seed(0))
        largest = head.log_prob(hidden, torch.arange(C)).double().exp().amax(0)
    expected = 0.9 * largest / largest.sum() + 0.1 * COUNTS / COUNTS.sum()
    torch.testing.assert_close(sampler.proposal(hidden, 1)[0][0], expected, rtol=0.05, atol=1e-6)


def test_a_sketch_holds_the_energy_of_hidden_in_multiples_of_16():
    generator = torch.Generator().manual_seed(0)
    size = torch.cat([torch.ones(20), torch.full((44,), 0.05)])
    hidden = torch.randn(4000, 64, generator=generator) * size
    sketch = Sketch.of(hidden.T @ hidden, None)
    assert sketch.basis.shape == (64, 32)
    torch.testing.assert_close(sketch.basis.T @ sketch.basis, torch.eye(32), atol=1e-5, rtol=0)
    assert (hidden @ sketch.basis).square().sum() > 0.9 * hidden.square().sum()
    assert Sketch.of(torch.eye(64), None).basis is None
    # More than half of the directions are not worth a sketch.
    assert Sketch.of((hidden.T @ hidden)[:60, :60], None).basis is None
    assert Sketch.of(torch.eye(64), 8).basis.shape == (64, 8)


def test_training_renews_the_sketch_from_hidden():
    head = ClassHead(D, C, sampler=Tailored(COUNTS, 3, rank=1, every=4))
    direction = torch.tensor([0.6, 0.0, 0.8])
    hidden = torch.randn(B, 1, generator=torch.Generator().manual_seed(0)) * direction
    for _ in range(5):
        head(hidden, TARGET).backward()
    torch.testing.assert_close(head.sampler.sketch.basis.abs().squeeze(1), direction)
    # Evaluations change nothing.
    before = head.sampler.moment
    head.eval()
    head(torch.randn(B, D), TARGET)
    assert head.sampler.moment is before


def test_a_pending_sketch_of_full_rank_is_restored():
    samplers = [Tailored(torch.ones(50), 5, every=8) for _ in range(2)]
    for sampler in samplers:
        sampler.attach(torch.randn(50, 64, generator=torch.Generator().manual_seed(0)))
    first, second = samplers
    first.sketch = Sketch.of(torch.eye(64), 16)
    first.moment = torch.eye(64)
    for _ in range(8):
        first.advance()
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        assert [tuple(sampler.sketch.basis.shape) for sampler in samplers] == [(64, 16)] * 2
        for sampler in samplers:
            sampler.advance()
    assert [sampler.sketch.basis for sampler in samplers] == [None, None]


def test_a_batch_of_nan_is_refused_and_teaches_nothing(kernels):
    head = ClassHead(D, C, sampler=Tailored(COUNTS, 3, group_size=3, rank=1, every=2))
    hidden = torch.randn(B, D, generator=torch.Generator().manual_seed(0))
    head(hidden, TARGET)
    moment = head.sampler.moment
    assert moment.isfinite().all()
    for bad in (torch.nan, torch.inf, 1e30):
        damaged = hidden.clone()
        damaged[2, 1] = bad
        candidates = head.sampler(TARGET, hidden=damaged)
        assert ((candidates.ids() >= 0) & (candidates.ids() < C)).all()
        assert (candidates.log_kappa() >= 0).all()
        head.sampler.observe(SimpleNamespace(hidden=damaged))
        assert torch.equal(head.sampler.moment, moment)
        if bad is torch.nan:
            with pytest.raises(ValueError, match="`hidden` must hold no NaN"):
                head(damaged, TARGET)
    with torch.no_grad():
        head.weight[3, 0] = torch.nan
    assert (head.sampler(TARGET, hidden=hidden).log_kappa() >= 0).all()
    for _ in range(4):
        head.sampler.advance()
    assert head.sampler.directions.isfinite().all()


def test_a_seed_decides_the_draw():
    sampler = Tailored(COUNTS, 3, group_size=3)
    _, hidden = model(sampler)
    draws = [sampler(TARGET, hidden=hidden, generator=torch.Generator().manual_seed(s)).ids() for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_k_can_be_changed():
    sampler = Tailored(COUNTS, 3)
    _, hidden = model(sampler)
    sampler.set_k(5)
    assert sampler(TARGET, hidden=hidden).ids().shape == (B, 5)
    check_unbiased(sampler, hidden)


def test_counts_are_read_again_and_resized():
    counts = ClassCounts(COUNTS)
    sampler = Tailored(counts, 3)
    _, hidden = model(sampler)
    counts.update(torch.full((500,), 7))
    sampler.refresh()
    assert sampler.proposal(None, 1)[0].argmax() == 7
    check_unbiased(sampler, hidden)
    sampler.resize(C + 4)
    # Without class vectors it draws from the counts.
    assert torch.equal(sampler.proposal(hidden, 1)[0], sampler.proposal(None, 1)[0])
    sampler.attach(torch.randn(C + 4, D))
    assert sampler(TARGET, hidden=hidden).ids().shape == (B, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tailored(torch.ones(5), 6), r"`k` must be in \[1, 5\], got 6"),
        (lambda: Tailored(torch.ones(5), 2, group_size=0), r"`group_size` must be at least 1, got 0"),
        (lambda: Tailored(torch.ones(5), 2, rank=0), r"`rank` must be at least 1, got 0"),
        (lambda: Tailored(torch.ones(5), 2, mix=0), r"`mix` must be finite and above 0, got 0"),
        (lambda: Tailored(torch.ones(5), 2, mix=1.5), r"`mix` must be at most 1, got 1.5"),
        (lambda: Tailored(torch.ones(5), 2, nearest=6), r"`nearest` must be in \[0, 5\], got 6"),
        (lambda: Tailored(torch.ones(5), 2).attach(torch.ones(4, 2)), r"`weight` must have shape \[5, D\]"),
        (
            lambda: Tailored(ClassCounts(torch.tensor([1.0, 0.0, 1.0]), smoothing=0), 2)(torch.tensor([0])),
            r"`counts` must be above 0 for every class that is not explicit, got 0 at position 1",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_biases_may_be_a_column():
    sampler = Tailored(torch.ones(50), 8)
    sampler.attach(torch.randn(50, 4), torch.randn(50, 2)[:, 0])
    assert sampler(torch.arange(5), hidden=torch.randn(5, 4)).ids().shape == (5, 8)
