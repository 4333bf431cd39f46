"""Every composition of samplers learns, uses the attached class vectors and resizes, or is refused when it is built."""

import copy

import pytest
import torch

from manyclass import ClassCounts, ClassHead, ScorerHead
from manyclass.samplers import (
    Automatic,
    Bernoulli,
    Budget,
    Clustered,
    Costs,
    Exhaustive,
    Importance,
    InBatch,
    Learned,
    Systematic,
    Tailored,
    WithExplicit,
)
from tests.samplers.test_rebuild import train

C, D, B, K = 90, 6, 16, 24
FIXED = torch.tensor([0, 4, 7])
COSTS = Costs(10.0, 1.0, 2.0, 0.01)


def counts():
    return ClassCounts(1 / torch.arange(1, C + 1, dtype=torch.float64))


INNER = {
    "exhaustive": lambda: Exhaustive(C),
    "importance": lambda: Importance(counts(), K),
    "bernoulli": lambda: Bernoulli(counts(), K),
    "systematic": lambda: Systematic(counts(), K, order="cluster"),
    "learned": lambda: Learned(counts(), K, every=4, order="cluster"),
    "clustered": lambda: Clustered(counts(), K, group_size=4, every=4),
    "tailored": lambda: Tailored(counts(), K, group_size=4, rank=3, every=4),
    "in batch": lambda: InBatch(counts(), K),
    "budget": lambda: Budget(Learned(counts(), K, every=4, order="cluster"), 0.1, every=1, least=8),
    "automatic": lambda: Automatic(counts(), 0.05, least=K, every=1, costs=COSTS),
}
WRAPPERS = {
    "batch explicit": lambda inner: WithExplicit(inner, "batch"),
    "set explicit": lambda inner: WithExplicit(inner, FIXED),
    "both explicit": lambda inner: WithExplicit(WithExplicit(inner, FIXED), "batch"),
}
FIXED_K = {"exhaustive", "clustered", "in batch", "budget", "automatic"}


def head_and_batch(sampler):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=sampler)
    generator = torch.Generator().manual_seed(3)
    return head, torch.randn(B, D, generator=generator), torch.randint(C, (B,), generator=generator)


def innermost(sampler):
    while isinstance(sampler, Budget | WithExplicit):
        sampler = sampler.sampler
    return sampler


def vectors_of(sampler):
    """Return the class vectors attached to a sampler."""
    if isinstance(sampler, Clustered | Tailored):
        return sampler.schedule.vectors
    order = getattr(sampler, "order", None)
    return () if order is None else order.vectors


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", INNER)
def test_a_wrapped_sampler_learns_as_it_does_alone(name, wrapper):
    alone = INNER[name]()
    head, hidden, target = head_and_batch(WRAPPERS[wrapper](INNER[name]()))
    assert head.sampler.learns == alone.learns
    inner = innermost(head.sampler)
    before = inner.estimate.clone() if isinstance(inner, Learned) else None
    train(head, hidden, target, range(12))
    if before is not None:
        changed = inner.estimate != before
        assert changed.sum() > K / 2
        assert inner.estimate.isfinite().all()
        if wrapper == "set explicit":
            assert not changed[FIXED].any() or name == "budget"
        # The table was rebuilt from the estimates at step 4 and taken up at step 5.
        assert inner.schedule.steps == 12


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["systematic", "learned", "clustered", "tailored", "budget"])
def test_class_vectors_are_attached_to_a_wrapped_sampler(name, wrapper):
    head, hidden, target = head_and_batch(WRAPPERS[wrapper](INNER[name]()))
    inner = innermost(head.sampler)
    assert vectors_of(inner)[0] is head.weight
    if isinstance(inner, Clustered | Tailored):
        train(head, hidden, target, range(3))
        assert inner.schedule.steps == 3
    twin = copy.deepcopy(head)
    assert vectors_of(innermost(twin.sampler))[0] is twin.weight


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", INNER)
def test_a_wrapped_sampler_is_resized_and_trains_on(name, wrapper):
    head, hidden, target = head_and_batch(WRAPPERS[wrapper](INNER[name]()))
    train(head, hidden, target, range(6))
    head.resize(C + 9)
    assert head.sampler.num_classes == innermost(head.sampler).num_classes == C + 9
    assert all(torch.tensor(train(head, hidden, torch.arange(B) + C - 7, range(6))).isfinite())


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", INNER)
def test_a_composition_continues_from_a_loaded_state(name, wrapper):
    head, hidden, target = head_and_batch(WRAPPERS[wrapper](INNER[name]()))
    train(head, hidden, target, range(7))
    other, _, _ = head_and_batch(WRAPPERS[wrapper](INNER[name]()))
    other.load_state_dict(head.state_dict())
    assert train(head, hidden, target, range(7, 14)) == train(other, hidden, target, range(7, 14))


@pytest.mark.parametrize("num_classes", [C - 9, C + 9])
@pytest.mark.parametrize("name", INNER)
def test_a_state_saved_right_after_a_resize_can_be_loaded(name, num_classes):
    head, hidden, target = head_and_batch(INNER[name]())
    train(head, hidden, target % (C - 9), range(7))
    head.resize(num_classes)
    if isinstance(head.sampler, Automatic):
        # A resize forgets the costs. Each head would measure its own, and the clock may choose another exact way.
        head.sampler.costs = COSTS
    other, _, _ = head_and_batch(INNER[name]())
    other.resize(num_classes)
    other.load_state_dict(head.state_dict())
    assert train(head, hidden, target % (C - 9), range(7)) == train(other, hidden, target % (C - 9), range(7))


@pytest.mark.parametrize("num_classes", [C - 9, C + 9])
@pytest.mark.parametrize("name", ["systematic", "learned", "clustered", "tailored"])
def test_a_resized_sampler_draws_every_class_before_vectors_are_attached_again(name, num_classes):
    sampler = INNER[name]()
    sampler.attach(torch.randn(C, D))
    hidden, target = torch.randn(B, D), torch.arange(B)
    drawn = set()
    for step in range(200):
        if step == 3:
            sampler.resize(num_classes)
            drawn = set()
        sampler.advance()
        drawn.update(sampler(target, hidden=hidden).ids().flatten().tolist())
    assert drawn == set(range(num_classes))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", INNER)
def test_a_budget_of_a_composition_adjusts_k_or_is_refused(name, wrapper):
    wrapped = WRAPPERS[wrapper](INNER[name]())
    if name in FIXED_K:
        with pytest.raises(
            ValueError, match="`sampler` must have a `k` to change, got a WithExplicit whose k is fixed"
        ):
            Budget(wrapped, 0.1)
        return
    head, hidden, target = head_and_batch(Budget(wrapped, 1e-3, least=8, every=1))
    inner = innermost(head.sampler)
    before = inner.k
    train(head, hidden, target, range(9))
    assert head.sampler.k == inner.k == min(C, 2 * before)
    if isinstance(inner, Learned):
        assert inner.schedule.steps == 9


@pytest.mark.parametrize("name", INNER)
def test_in_batch_has_no_inner_sampler(name):
    with pytest.raises(TypeError, match=r"`counts` must be a Tensor, got "):
        InBatch(INNER[name]())


def test_nothing_is_learned_from_slots_emptied_by_the_explicit_set():
    head, hidden, _ = head_and_batch(WithExplicit(Learned(counts(), K), "batch"))
    inner = head.sampler.sampler
    before = inner.estimate.clone()
    target = torch.arange(B)
    train(head, hidden, target, range(5))
    assert torch.equal(inner.estimate[target], before[target])
    assert not torch.equal(inner.estimate, before)


def test_learned_draws_no_class_of_a_fixed_explicit_set():
    head, hidden, target = head_and_batch(WithExplicit(Learned(counts(), K, every=4), FIXED))
    train(head, hidden, target, range(12))
    drawn = head.sampler.sampler(target, generator=torch.Generator().manual_seed(0))
    assert drawn.ids().shape == (B, K)
    assert not torch.isin(drawn.ids(), FIXED).any()


def test_a_sampler_without_the_life_cycle_is_refused():
    class Half(torch.nn.Module):
        num_classes, device, learns = C, None, False

        def draw(self, target, exclude, *, hidden, generator): ...

    message = r"`sampler` must have the members of samplers.Sampler, got a Half without 'attach'"
    with pytest.raises(TypeError, match=message):
        ClassHead(D, C, sampler=Half())
    with pytest.raises(TypeError, match=message):
        ScorerHead(lambda hidden, ids: hidden, Half())
