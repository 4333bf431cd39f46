"""Counts reach a head through any sampler, with classes that never occurred."""

import pytest
import torch

from manyclass import ClassCounts, ClassHead
from manyclass.samplers import Bernoulli, Exhaustive, Importance, InBatch, Systematic, WithExplicit
from tests.uses.table import (
    HIDDEN,
    SAMPLERS,
    STEPS,
    WEIGHTS,
    B,
    C,
    D,
    K,
    draws,
    head_of,
    identical,
    sampler_of,
    train,
)

# These know no counts: all classes, a set of ids, and inclusion probabilities.
WITHOUT_COUNTS = ("exhaustive", "set alone", "bernoulli, given probabilities")
KNOWING = [name for name in SAMPLERS if name not in WITHOUT_COUNTS]
RAW = torch.tensor([50.0, 0.0, 7.0, 3.0, 0.0, 20.0, 1.0, 2.0, 1.0, 4.0]).repeat(C // 10).double()
SMOOTHED = torch.where(RAW > 0, RAW, 1.0)


def log_frequency(weights):
    return (weights / weights.sum()).log().float()


@pytest.mark.parametrize("name", KNOWING)
def test_the_bias_starts_at_the_log_frequency_of_the_samplers_counts(name):
    torch.testing.assert_close(ClassHead(D, C, sampler=SAMPLERS[name](WEIGHTS)).bias.detach(), log_frequency(WEIGHTS))


FROM_COUNTS = {
    "importance": lambda counts: Importance(counts, K, power=0.75),
    "systematic": lambda counts: Systematic(counts, K, power=0.5),
    "bernoulli": lambda counts: Bernoulli(counts, K),
    "proportional bernoulli": lambda counts: Bernoulli.proportional(counts, K),
    "in batch": lambda counts: InBatch(counts, K, power=0.75),
    "minibatch explicit": lambda counts: WithExplicit(Systematic(counts, K, power=0.5), "batch"),
    "fixed set explicit": lambda counts: WithExplicit(Systematic(counts, K), torch.tensor([0, 4])),
}


@pytest.mark.parametrize("name", FROM_COUNTS)
def test_the_bias_is_that_of_the_counts_whatever_the_sampler_makes_of_them(name):
    head = ClassHead(D, C, sampler=FROM_COUNTS[name](ClassCounts(RAW)))
    torch.testing.assert_close(head.bias.detach(), log_frequency(SMOOTHED))
    drawn = torch.cat([draw.flatten() for draw in draws(head)[::2]])
    assert ((drawn >= 0) & (drawn < C)).all()


def test_counts_of_the_head_go_before_those_of_the_sampler():
    head = ClassHead(D, C, counts=WEIGHTS.flip(0), sampler=sampler_of(("class", "clustered")))
    torch.testing.assert_close(head.bias.detach(), log_frequency(WEIGHTS.flip(0)))


def test_a_sampler_without_counts_leaves_the_bias_at_zero():
    assert not ClassHead(D, C, sampler=Exhaustive(C)).bias.any()
    assert ClassHead(D, C, sampler=SAMPLERS["learned"](WEIGHTS), bias=False).bias is None


@pytest.mark.parametrize("name", KNOWING)
def test_raw_counts_with_unseen_classes_count_them_as_the_rarest(name):
    cell = ("class", name)
    head, twin = head_of(cell, sampler=SAMPLERS[name](RAW)), head_of(cell, sampler=SAMPLERS[name](SMOOTHED))
    assert identical(draws(head), draws(twin))
    assert all(loss.isfinite().all() for loss in train(head, range(STEPS)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_unseen_class_can_be_drawn_and_can_be_a_target(name):
    torch.manual_seed(0)
    sampler = SAMPLERS[name](RAW)
    target = torch.ones(B, dtype=torch.int64)
    candidates = sampler(target, hidden=HIDDEN)
    assert candidates.log_kappa().isfinite().any()
    if name == "set alone":
        return
    assert candidates.target_log_kappa().isfinite().all()
    head = head_of(("class", name), sampler=sampler)
    assert head(HIDDEN, target).isfinite()
    drawn = torch.cat([draw.flatten() for draw in draws(head)[::2]])
    assert ((drawn >= 0) & (drawn < C)).all()


@pytest.mark.parametrize("name", KNOWING)
def test_counts_in_integers_and_single_precision_are_taken(name):
    counts = (WEIGHTS * 5000).round()
    expected = draws(head_of(("class", name), sampler=SAMPLERS[name](counts)))
    for dtype in (torch.int64, torch.float32):
        head = head_of(("class", name), sampler=SAMPLERS[name](counts.to(dtype)))
        assert identical(draws(head), expected)
