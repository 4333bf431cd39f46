"""A loaded state is refused, or leads to the draws of the sampler that saved it, now and after rebuilds."""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations

from manyclass import ClassCounts, ClassHead
from manyclass.samplers import (
    Bernoulli,
    Clustered,
    Importance,
    InBatch,
    Learned,
    Systematic,
    Tailored,
    WithExplicit,
)

C, D, B, K = 80, 4, 8, 12
WEIGHTS = 1 / torch.arange(1, C + 1, dtype=torch.float64)
HIDDEN = torch.randn(B, D, generator=torch.Generator().manual_seed(0))
TARGET = torch.arange(B)


def inclusion(sampler):
    """Return Σ κ of each class, the mean over draws: 1 if the sampler is unbiased."""
    total, draws = torch.zeros(C, dtype=torch.float64), 400
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        for block in sampler(torch.tensor([0]), generator=generator).blocks:
            total.index_add_(0, block.ids[0], block.log_kappa[0].exp())
    return total / draws


@pytest.mark.parametrize("make", [Importance, Systematic, Bernoulli, Bernoulli.proportional, Learned])
def test_an_explicit_set_of_another_sampler_is_left_out_of_its_draws_after_a_refresh(make):
    sampler = WithExplicit(make(ClassCounts(WEIGHTS), K), torch.tensor([1, 2]))
    other = WithExplicit(make(ClassCounts(WEIGHTS), K), torch.tensor([40, 41]))
    other.load_state_dict(sampler.state_dict())
    other.refresh()
    found = inclusion(other)
    assert found[[1, 2]].tolist() == [1, 1]
    assert ((found > 0.2) & (found < 5)).float().mean() > 0.9


STATES = {
    "all weights 0": (lambda: Systematic(WEIGHTS, K), "weights", lambda x: x * 0),
    "some weights 0": (lambda: Importance(WEIGHTS, K), "weights", lambda x: x * (torch.arange(C) > 3)),
    "all learned weights 0": (lambda: Learned(WEIGHTS, K), "weights", lambda x: x * 0),
    "no estimate": (lambda: Learned(WEIGHTS, K), "estimate", lambda x: x * 0),
    "an estimate of NaN": (lambda: Learned(WEIGHTS, K), "estimate", lambda x: x * torch.nan),
    "counts of nothing": (lambda: Learned(ClassCounts(WEIGHTS, smoothing=0), K), "counts.raw", lambda x: x * 0),
    "huge counts": (lambda: Systematic(ClassCounts(WEIGHTS), K, power=2.0), "source.weights.raw", lambda x: x * 1e200),
    "huge centroids": (lambda: Clustered(WEIGHTS, K), "centroids", lambda x: x + 3e38),
    "huge pending centroids": (lambda: Clustered(WEIGHTS, K), "pending_centroids", lambda x: x + 3e38),
    "a frequency of 0": (lambda: InBatch(WEIGHTS), "frequency", lambda x: x * (torch.arange(C) > 3)),
    "too many kept": (lambda: Bernoulli(WEIGHTS, K), "rates", lambda x: torch.where(x > 0, 0.69, 0.0)),
    "all counts 0": (lambda: Tailored(WEIGHTS, K), "weights", lambda x: x * 0),
    "a moment of NaN": (lambda: Tailored(WEIGHTS, K), "moment", lambda x: x * torch.nan),
    "infinite directions": (lambda: Tailored(WEIGHTS, K), "directions", lambda x: x + torch.inf),
    "directions of another length": (lambda: Tailored(WEIGHTS, K), "directions", lambda x: x[1:, 1:]),
    "directions of another dtype": (lambda: Tailored(WEIGHTS, K), "directions", torch.Tensor.half),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_would_fail_later_is_refused(name):
    make, key, change = STATES[name]
    sampler = make()
    sampler.attach(torch.randn(C, D))
    sampler(TARGET, hidden=HIDDEN)
    state = {entry: value.clone() for entry, value in sampler.state_dict().items()}
    if name == "huge pending centroids":
        for entry in ("labels", "weights"):
            state[f"pending_{entry}"] = state[entry]
    state[key] = change(state[key])
    with pytest.raises(RuntimeError, match=f"`{key.rpartition('.')[2].removeprefix('pending_')}`"):
        sampler.load_state_dict(state)


def test_raw_weights_with_zeros_are_smoothed_after_a_load():
    weights = torch.rand(C, generator=torch.Generator().manual_seed(0)) + 0.5
    weights[5] = 0
    sampler, other = Clustered(weights, K), Clustered(torch.ones(C), K)
    other.load_state_dict(sampler.state_dict())
    other.attach(torch.randn(C, D))
    other.refresh()
    assert other(TARGET, hidden=HIDDEN).ids().shape == (B, K)


def test_a_state_loaded_in_inference_mode_can_be_trained():
    head, other = (ClassHead(D, C, sampler=Learned(WEIGHTS, K, order="cluster")) for _ in range(2))
    with torch.inference_mode():
        other.load_state_dict(head.state_dict())
    other(HIDDEN, TARGET).backward()
    other(HIDDEN, TARGET).backward()


def test_a_batch_that_overflows_teaches_nothing():
    head = ClassHead(D, C, sampler=Learned(WEIGHTS, K, every=2))
    for number in range(12):
        hidden = HIDDEN.clone()
        if number == 3:
            observed = head.sampler.estimate.clone()
            candidates = head.sampler(TARGET)
            head.sampler._learn(
                candidates.blocks[0].ids[0], candidates.blocks[0].log_kappa[0], torch.full((K,), torch.nan)
            )
            assert torch.equal(head.sampler.estimate, observed)
        assert head(hidden, TARGET) > 0


def test_a_tailored_sampler_without_vectors_takes_the_state_of_one_with_them():
    head, other = ClassHead(D, C, sampler=Tailored(WEIGHTS, K, rank=2, every=2)), Tailored(WEIGHTS, K, rank=2, every=2)
    for _ in range(5):
        head(HIDDEN, TARGET).backward()
    other.load_state_dict(head.sampler.state_dict())
    other.attach(head.weight, head.bias)
    draws = [each(TARGET, hidden=HIDDEN, generator=torch.Generator().manual_seed(0)) for each in (head.sampler, other)]
    assert head.sampler.sketch.basis.shape == (D, 2)
    assert torch.equal(draws[0].ids(), draws[1].ids())


@pytest.mark.parametrize("make", [lambda: Learned(WEIGHTS, K, order="cluster"), lambda: Clustered(WEIGHTS, K)])
def test_a_head_with_a_parametrised_weight_can_be_copied_after_a_step(make):
    head = parametrizations.weight_norm(ClassHead(D, C, sampler=make()))
    head(HIDDEN, TARGET).backward()
    twin = copy.deepcopy(head)
    assert twin(HIDDEN, TARGET).isfinite()
