"""Bad input is refused with an error that names the argument, the rule and the value."""

import pytest
import torch
from torch import nn

import manyclass
from manyclass import ClassCounts, ClassHead, HierarchicalHead, diagnose
from manyclass.objectives import HingeRanking, Likelihood, LogisticRanking, NoiseContrastive
from manyclass.samplers import Bernoulli, Exhaustive, Importance, Systematic, WithExplicit

C, D, B = 10, 4, 3
ONES = torch.ones(C)


def weights(position, value):
    changed = torch.ones(C, dtype=torch.float64)
    changed[position] = value
    return changed


def head(**options):
    return ClassHead(D, C, sampler=Importance(ONES, 3), **options)


def hidden(**options):
    return torch.zeros(B, D, **options)


TARGET = torch.zeros(B, dtype=torch.int64)

REFUSED = {
    # Weights, counts and probabilities.
    "zero weight": (
        lambda: Importance(ClassCounts(weights(3, 0.0), smoothing=0), 2)(TARGET),
        ValueError,
        r"`weights` must be above 0 for every class that is not explicit, got 0 at position 3",
    ),
    "zero weight, systematic": (
        lambda: Systematic(ClassCounts(weights(3, 0.0), smoothing=0), 2)(TARGET),
        ValueError,
        r"`weights` .* position 3",
    ),
    "zero count": (
        lambda: Bernoulli(ClassCounts(weights(3, 0.0), smoothing=0), 2)(TARGET),
        ValueError,
        r"`counts` .* got 0 at position 3",
    ),
    "zero weight, another class explicit": (
        lambda: WithExplicit(Importance(ClassCounts(weights(3, 0.0), smoothing=0), 2), torch.tensor([4]))(TARGET),
        ValueError,
        r"`weights` .* got 0 at position 3",
    ),
    "infinite weight": (
        lambda: Importance(weights(2, torch.inf), 2),
        ValueError,
        r"`weights` must be finite and not negative, got inf at position 2",
    ),
    "negative weight": (lambda: Systematic(weights(2, -1.0), 2), ValueError, r"`weights` .* got -1.0 at position 2"),
    "NaN weight": (lambda: Importance(weights(2, torch.nan), 2), ValueError, r"`weights` .* got nan at position 2"),
    "weights not a tensor": (lambda: Importance([1.0], 2), TypeError, r"`weights` must be a Tensor, got list"),
    "weights of two dimensions": (
        lambda: Importance(torch.ones(2, 3), 2),
        ValueError,
        r"`weights` must be a vector .* got shape \[2, 3\]",
    ),
    "no weights": (lambda: Importance(torch.ones(0), 2), ValueError, r"`weights` must be a vector .* got shape \[0\]"),
    "all weights zero": (
        lambda: Importance(torch.zeros(4), 2),
        ValueError,
        r"`weights` must not all be 0, got 4 zeros",
    ),
    "negative count": (
        lambda: ClassCounts(torch.tensor([1, -2])),
        ValueError,
        r"`counts` must be finite and not negative, got -2.0 at position 1",
    ),
    "NaN count": (lambda: ClassCounts(torch.tensor([torch.nan, 1])), ValueError, r"`counts` .* got nan at position 0"),
    "all counts zero": (lambda: ClassCounts(torch.zeros(5)), ValueError, r"`counts` must not all be 0, got 5 zeros"),
    "counts of the wrong length": (
        lambda: ClassHead(D, C, counts=torch.ones(7)),
        ValueError,
        r"`counts` must have length 10, got 7",
    ),
    "counts of the wrong length, hierarchical": (
        lambda: HierarchicalHead(D, C, counts=torch.ones(7)),
        ValueError,
        r"`counts` must have length 10, got 7",
    ),
    "negative smoothing": (
        lambda: ClassCounts(ONES, smoothing=-1.0),
        ValueError,
        r"`smoothing` must be finite and at least 0, got -1.0",
    ),
    "empty stream without smoothing": (
        lambda: ClassCounts.streaming(3, smoothing=0).frequency(),
        ValueError,
        r"`counts` must not all be 0 when smoothing is off, got 3 zeros",
    ),
    "target out of range while counting": (
        lambda: ClassCounts.from_targets(torch.tensor([0, 12]), 10),
        ValueError,
        r"`targets` must lie in \[0, 10\), got 12 at position 1",
    ),
    "probability above 1": (
        lambda: Bernoulli.from_probabilities(weights(4, 1.5)),
        ValueError,
        r"`probabilities` must be at most 1, got 1.5 at position 4",
    ),
    "power not finite": (lambda: Importance(ONES, 2, power=torch.inf), ValueError, r"`power` must be finite, got inf"),
    # k and group sizes.
    "k of 0": (lambda: Importance(ONES, 0), ValueError, r"`k` must be at least 1, got 0"),
    "k above C, systematic": (lambda: Systematic(ONES, 11), ValueError, r"`k` must be in \[1, 10\], got 11"),
    "k above C, Bernoulli": (lambda: Bernoulli(ONES, 11), ValueError, r"`k` must be in \[1, 10\], got 11"),
    "k not an int": (lambda: Systematic(ONES, 2.5), TypeError, r"`k` must be an int, got 2.5"),
    "group size of 0": (
        lambda: Importance(ONES, 2, group_size=0),
        ValueError,
        r"`group_size` must be at least 1, got 0",
    ),
    "k of top-k above C": (lambda: head().topk(hidden(), 11), ValueError, r"`k` must be in \[1, 10\], got 11"),
    "no draws": (lambda: diagnose(head(), hidden(), TARGET, draws=0), ValueError, r"`draws` must be at least 1, got 0"),
    # Explicit sets.
    "explicit id repeated": (
        lambda: WithExplicit(Importance(ONES, 2), torch.tensor([1, 4, 1])),
        ValueError,
        r"`explicit` must not repeat a class, got 1 at position 2 again",
    ),
    "explicit id out of range": (
        lambda: WithExplicit(Importance(ONES, 2), torch.tensor([1, 10])),
        ValueError,
        r"`explicit` must lie in \[0, 10\), got 10 at position 1",
    ),
    "explicit set empty": (
        lambda: WithExplicit(Importance(ONES, 2), torch.tensor([], dtype=torch.int64)),
        ValueError,
        r"`explicit` must be a vector of at least one class, got shape \[0\]",
    ),
    "explicit set unknown": (
        lambda: WithExplicit(Importance(ONES, 2), "bach"),
        ValueError,
        r"`explicit` must be one of 'batch', got 'bach'",
    ),
    "set alone of unknown size": (
        lambda: WithExplicit(None, torch.tensor([1])),
        ValueError,
        r"`num_classes` must be given if `sampler` is None, got None",
    ),
    "explicit set of another size": (
        lambda: WithExplicit(Importance(ONES, 2), "batch", num_classes=9),
        ValueError,
        r"`num_classes` must be the sampler's 10, got 9",
    ),
    "budget below k": (
        lambda: WithExplicit.budget(Systematic(ONES, 5), 5),
        ValueError,
        r"`total` must be in \[6, 10\], got 5",
    ),
    "budget without k": (
        lambda: WithExplicit.budget(Bernoulli.from_probabilities(ONES), 5),
        ValueError,
        r"`sampler` must have a `k` to split a budget",
    ),
    # Targets.
    "target too large": (
        lambda: head()(hidden(), torch.tensor([0, 10, 3])),
        ValueError,
        r"`target` must lie in \[0, 10\), got 10 at position 1",
    ),
    "target negative": (
        lambda: head()(hidden(), torch.tensor([0, 1, -2])),
        ValueError,
        r"`target` must lie in \[0, 10\), got -2 at position 2",
    ),
    "target in a sequence": (
        lambda: head()(torch.zeros(2, 2, D), torch.tensor([[0, 1], [99, 0]])),
        ValueError,
        r"`target` must lie in \[0, 10\), got 99 at position \(1, 0\)",
    ),
    "target of floats": (
        lambda: head()(hidden(), torch.zeros(B)),
        TypeError,
        r"`target` must hold integers, got torch.float32",
    ),
    "target of bools": (
        lambda: head()(hidden(), TARGET.bool()),
        TypeError,
        r"`target` must hold integers, got torch.bool",
    ),
    "target of another shape": (
        lambda: head()(hidden(), torch.zeros(4, dtype=torch.int64)),
        ValueError,
        r"`target` must have the leading shape of `hidden`, \[3\], got \[4\]",
    ),
    "target one-hot": (
        lambda: head()(hidden(), torch.zeros(B, C, dtype=torch.int64)),
        ValueError,
        r"`target` must have the leading shape of `hidden`, \[3\], got \[3, 10\]",
    ),
    "empty batch": (
        lambda: head()(torch.zeros(0, D), torch.zeros(0, dtype=torch.int64)),
        ValueError,
        r"`target` must hold at least one class, got shape \[0\]",
    ),
    "target of a sampler": (
        lambda: Exhaustive(C)(torch.tensor([[1]])),
        ValueError,
        r"`target` must be a vector of at least one class, got shape \[1, 1\]",
    ),
    "target too large for a sampler": (
        lambda: Systematic(ONES, 2)(torch.tensor([3, 10])),
        ValueError,
        r"`target` must lie in \[0, 10\), got 10 at position 1",
    ),
    "hierarchical target": (
        lambda: HierarchicalHead(D, C)(hidden(), torch.tensor([0, 1, 10])),
        ValueError,
        r"`target` must lie in \[0, 10\), got 10 at position 2",
    ),
    # Other arguments of a head.
    "exclude out of range": (
        lambda: head()(hidden(), TARGET, exclude=torch.tensor([[1], [2], [-3]])),
        ValueError,
        r"`exclude` must lie in \[0, 10\) \(or be -1, a pad\), got -3 at position \(2, 0\)",
    ),
    "exclude of another shape": (
        lambda: head()(hidden(), TARGET, exclude=torch.tensor([1, 2, 3])),
        ValueError,
        r"`exclude` must have shape \[3, N\], got \[3\]",
    ),
    "exclude of a sampler": (
        lambda: Importance(ONES, 2)(TARGET, exclude=torch.tensor([[1]])),
        ValueError,
        r"`exclude` must have shape \[3, N\], got \[1, 1\]",
    ),
    "include out of range": (
        lambda: head()(hidden(), TARGET, include=torch.tensor([[1], [10], [-1]])),
        ValueError,
        r"`include` must lie in \[0, 10\) \(or be -1, a pad\), got 10 at position \(1, 0\)",
    ),
    "include of another shape": (
        lambda: head()(hidden(), TARGET, include=torch.tensor([[1], [2]])),
        ValueError,
        r"`include` must have shape \[3, N\], got \[2, 1\]",
    ),
    "include of floats": (
        lambda: head()(hidden(), TARGET, include=torch.ones(3, 1)),
        TypeError,
        "`include` must hold integers, got torch.float32",
    ),
    "include of a list": (
        lambda: head()(hidden(), TARGET, include=[[1]] * 3),
        TypeError,
        "`include` must be a Tensor, got list",
    ),
    "include on another device": (
        lambda: head()(hidden(), TARGET, include=torch.ones(3, 1, dtype=torch.int64, device="meta")),
        ValueError,
        "`include` must be on cpu, got meta",
    ),
    "include of a sampler": (
        lambda: Importance(ONES, 2)(TARGET, include=torch.tensor([[1]])),
        ValueError,
        r"`include` must have shape \[3, N\], got \[1, 1\]",
    ),
    "include out of a sampler's range": (
        lambda: Importance(ONES, 2)(TARGET, include=torch.tensor([[-2]] * 3)),
        ValueError,
        r"`include` must lie in \[0, 10\) \(or be -1, a pad\), got -2 at position \(0, 0\)",
    ),
    "weight of another shape": (
        lambda: head()(hidden(), TARGET, weight=torch.ones(2)),
        ValueError,
        r"`weight` must have shape \[3\], got \[2\]",
    ),
    "weight negative": (
        lambda: head()(hidden(), TARGET, weight=torch.tensor([1.0, -1.0, 1.0])),
        ValueError,
        r"`weight` must be finite and not negative, got -1.0 at position 1",
    ),
    "weight of integers": (
        lambda: head()(hidden(), TARGET, weight=torch.tensor([1, 1, 1])),
        TypeError,
        r"`weight` must hold floating-point numbers, got torch.int64",
    ),
    "hidden of another width": (
        lambda: head()(torch.zeros(B, 5), TARGET),
        ValueError,
        r"`hidden` must have shape \[..., 4\], got \[3, 5\]",
    ),
    "hidden of another dtype": (
        lambda: head()(hidden(dtype=torch.float64), TARGET),
        ValueError,
        r"`hidden` must have the head's dtype, torch.float32, outside autocast, got torch.float64",
    ),
    "hidden on another device": (
        lambda: head()(hidden(device="meta"), TARGET),
        ValueError,
        r"`hidden` must be on cpu, got meta",
    ),
    "target on another device": (
        lambda: head()(hidden(), TARGET.to("meta")),
        ValueError,
        r"`target` must be on cpu, got meta",
    ),
    "hidden not a tensor": (lambda: head()([[0.0] * D], TARGET), TypeError, r"`hidden` must be a Tensor, got list"),
    "hidden with NaN": (
        lambda: head()(torch.tensor([[0.0] * D, [0.0, torch.nan, 0.0, 0.0], [0.0] * D]), TARGET),
        ValueError,
        r"The loss of example 1 is NaN: `hidden` must hold no NaN, got one at position \(1, 1\)",
    ),
    "hidden with NaN, exactly": (
        lambda: head().exact_loss(torch.full((B, D), torch.nan), TARGET),
        ValueError,
        r"The loss of example 0 is NaN: `hidden` must hold no NaN",
    ),
    "log z without a z": (
        lambda: head()(hidden(), TARGET, log_z=torch.zeros(B)),
        ValueError,
        r"`log_z` must be None for Likelihood\(\), which has no z, got a tensor",
    ),
    "log z of another shape": (
        lambda: head(objective=NoiseContrastive())(hidden(), TARGET, log_z=torch.zeros(2)),
        ValueError,
        r"`log_z` must have shape \[3\], got \[2\]",
    ),
    "reduction": (
        lambda: head()(hidden(), TARGET, reduction="avg"),
        ValueError,
        r"`reduction` must be one of 'mean', 'sum', 'none', got 'avg'",
    ),
    "ids out of range": (
        lambda: head().log_prob(hidden(), torch.tensor([10])),
        ValueError,
        r"`ids` must lie in \[0, 10\), got 10 at position 0",
    ),
    # Options.
    "similarity": (lambda: head(similarity="l2"), ValueError, r"`similarity` must be one of 'dot', 'cosine', got 'l2'"),
    "update": (lambda: head(update="all"), ValueError, r"`update` must be one of 'scored', 'observed', got 'all'"),
    "scale": (lambda: head(scale=0.0), ValueError, r"`scale` must be finite and above 0, got 0.0"),
    "dim": (lambda: ClassHead(0, C), ValueError, r"`dim` must be at least 1, got 0"),
    "number of classes": (lambda: ClassHead(D, 0), ValueError, r"`num_classes` must be at least 1, got 0"),
    "one class in a tree": (lambda: HierarchicalHead(D, 1), ValueError, r"`num_classes` must be at least 2, got 1"),
    "sampler of another size": (
        lambda: ClassHead(D, C, sampler=Exhaustive(9)),
        ValueError,
        r"`sampler` must draw from 10 classes, got 9",
    ),
    "shared weight of another shape": (
        lambda: ClassHead(D, C, weight=nn.Parameter(torch.zeros(C, 3))),
        ValueError,
        r"`weight` must have shape \[10, 4\], got \[10, 3\]",
    ),
    "margin": (lambda: LogisticRanking(torch.nan), ValueError, r"`margin` must be finite, got nan"),
    "margin not a number": (lambda: HingeRanking("1"), TypeError, r"`margin` must be a number, got '1'"),
    "log z": (lambda: NoiseContrastive(torch.inf), ValueError, r"`log_z` must be finite, got inf"),
    "embedding that rescales": (
        lambda: ClassHead.tied(nn.Embedding(C, D, max_norm=1.0)),
        ValueError,
        r"`embedding` must not rescale its rows, got max_norm=1.0",
    ),
    "resized sampler of another size": (
        lambda: head().resize(12, sampler=Exhaustive(11)),
        ValueError,
        r"`sampler` must draw from 12 classes, got 11",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_a_clear_message(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_checks_of_values_can_be_turned_off():
    bad = torch.full((B, D), torch.nan)
    manyclass.check_values(False)
    try:
        assert head()(bad, TARGET).isnan()
    finally:
        manyclass.check_values(None)
    with pytest.raises(ValueError, match="NaN"):
        head()(bad, TARGET)


def test_a_refused_call_leaves_the_head_unchanged():
    tried = head(objective=Likelihood())
    before = {name: value.clone() for name, value in tried.state_dict().items()}
    with pytest.raises(ValueError, match="`sampler` must be built from ClassCounts"):
        tried.resize(20)
    assert all(torch.equal(before[name], value) for name, value in tried.state_dict().items())
    assert tried.sampler.num_classes == C
