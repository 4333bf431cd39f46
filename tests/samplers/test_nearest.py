"""Nearest: the nearest classes are summed exactly; a class that the index misses adds variance, never bias."""

import copy
import pickle
import sys

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.samplers import Nearest, Systematic, WithExplicit, _index

C, D, B = 40, 6, 9
ALL_LISTS = 10**6


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(C, D, generator=generator)
    bias = torch.randn(C, generator=generator)
    weights = torch.rand(C, generator=generator, dtype=torch.float64) + 0.05
    return vectors, bias, weights, torch.randn(B, D, generator=generator)


def check_unbiased(sampler, hidden, draws=3000, extra=None):
    """Check that sums are unbiased for each example, with its target and the `extra` classes excluded."""
    g = torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    target = torch.arange(B)
    exclude = target.unsqueeze(1) if extra is None else torch.cat([target.unsqueeze(1), extra], 1)
    kept = torch.ones(B, C + 1, dtype=torch.float64).scatter_(1, exclude % (C + 1), 0.0)[:, :C]
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(draws):
        candidates = sampler(target, hidden=hidden, exclude=exclude, generator=generator)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        found.append((kappa * g[candidates.ids()]).sum(1))
    found = torch.stack(found)
    error = (found.mean(0) - kept @ g).abs()
    assert (error <= 4.5 * found.std(0) / draws**0.5 + 1e-9).all()


@pytest.mark.parametrize("group_size", [None, 1, 2, 4, 16])
def test_draws_are_unbiased_for_every_group_size(group_size):
    vectors, bias, weights, hidden = model()
    # Some classes are drawn with probability 1.
    weights[5:8] += 20
    sampler = Nearest(weights, 12, group_size=group_size)
    sampler.attach(vectors, bias)
    check_unbiased(sampler, hidden)


def test_draws_are_unbiased_with_more_classes_excluded():
    vectors, bias, weights, hidden = model()
    sampler = Nearest(weights, 12, group_size=2)
    sampler.attach(vectors, bias)
    nearest = (hidden @ vectors.T + bias).topk(3).indices
    check_unbiased(sampler, hidden, extra=torch.cat([nearest, torch.full((B, 1), -1)], 1))


@pytest.mark.parametrize("group_size", [None, 1, 4])
def test_draws_are_unbiased_with_a_stale_index(group_size):
    vectors, bias, weights, hidden = model()
    sampler = Nearest(weights, 12, group_size=group_size, every=10**6)
    sampler.attach(vectors, bias)
    sampler(torch.arange(B), hidden=hidden)
    found = sampler.index.centroids.clone()
    vectors.copy_(model(seed=5)[0])
    bias.zero_()
    check_unbiased(sampler, hidden)
    assert torch.equal(sampler.index.centroids, found)


@pytest.mark.parametrize("attached", [False, True])
def test_the_heaviest_classes_replace_the_nearest_without_vectors_or_hidden(attached):
    vectors, bias, weights, hidden = model()
    weights[5:8] += 20
    sampler = Nearest(weights, 12, nearest=4, group_size=2)
    if attached:
        sampler.attach(vectors, bias)
    hidden = None if attached else hidden
    candidates = sampler(torch.arange(B), hidden=hidden)
    certain, both = candidates.blocks
    assert certain.ids.tolist() == [[5, 6, 7]]
    left = weights.clone()
    left[5:8] = 0
    assert (both.ids[:, :4] == left.topk(4).indices).all()
    check_unbiased(sampler, hidden)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("group_size", [None, 1])
def test_explicit_classes_are_the_nearest_if_all_lists_are_searched(group_size, with_bias):
    vectors, bias, weights, hidden = model()
    sampler = Nearest(weights, 12, nearest=5, group_size=group_size, probes=ALL_LISTS)
    sampler.attach(vectors, bias if with_bias else None)
    (block,) = sampler(torch.arange(B), hidden=hidden).blocks
    scores = hidden @ vectors.T + (bias if with_bias else 0)
    expected = (scores if group_size else scores.mean(0, keepdim=True)).topk(5).indices
    assert torch.equal(block.ids[:, :5], expected)
    assert (block.log_kappa[:, :5] == 0).all()
    # A class among the nearest is not summed again.
    again = (block.ids[:, 5:].unsqueeze(2) == expected.unsqueeze(1)).any(2)
    assert torch.equal(block.log_kappa[:, 5:].isneginf(), again)


def test_a_search_on_threads_finds_the_same_classes(monkeypatch):
    vectors, bias, weights, hidden = model()
    sampler = Nearest(weights, 12, probes=3)
    sampler.attach(vectors, bias)
    found = []
    for threshold in (0, 10**6):
        monkeypatch.setattr(_index, "MIN_PRODUCTS_FOR_THREADS", threshold)
        found.append(sampler(torch.arange(B), hidden=hidden, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(found[0].ids(), found[1].ids())


def test_examples_near_the_same_classes_share_a_group():
    weights = torch.ones(C)
    centres = 4 * torch.eye(D)[:4]
    vectors = centres[torch.arange(C) % 4] + 0.1 * torch.randn(C, D, generator=torch.Generator().manual_seed(0))
    hidden = centres[torch.arange(12) % 4]
    sampler = Nearest(weights, 10, nearest=5, group_size=3, lists=4, probes=1)
    sampler.attach(vectors)
    candidates = sampler(torch.arange(12), hidden=hidden)
    assert (candidates.ids()[:, :5] % 4 == (torch.arange(12) % 4).unsqueeze(1)).all()


def test_slots_are_empty_if_fewer_classes_are_found():
    vectors, _, weights, hidden = model()
    sampler = Nearest(weights, 24, nearest=20, lists=10, probes=1)
    sampler.attach(vectors)
    candidates = sampler(torch.arange(B), hidden=hidden)
    near = candidates.blocks[-1].log_kappa[:, :20]
    assert near.isneginf().any()
    assert (near[~near.isneginf()] == 0).all()
    assert (candidates.ids() >= 0).all()
    check_unbiased(sampler, hidden)


def test_an_empty_index_finds_nothing():
    vectors, _, weights, hidden = model()
    # All classes left after the explicit set are drawn with probability 1.
    sampler = Nearest(weights, 12, nearest=6).without(torch.arange(C - 5))
    sampler.attach(vectors)
    candidates = sampler(torch.arange(B), hidden=hidden)
    present = ~candidates.log_kappa().isneginf()
    assert all(
        sorted(row[p].tolist()) == list(range(C - 5, C)) for row, p in zip(candidates.ids(), present, strict=True)
    )


@pytest.mark.parametrize("group_size", [None, 1, 4])
def test_target_log_kappa_matches_how_often_targets_are_drawn(group_size):
    vectors, bias, weights, hidden = model()
    weights[3] += 30
    sampler = Nearest(weights, 12, group_size=group_size)
    sampler.attach(vectors, bias)
    target, generator = torch.arange(B), torch.Generator().manual_seed(0)
    count, expected, draws = torch.zeros(B, dtype=torch.float64), None, 3000
    for _ in range(draws):
        candidates = sampler(target, hidden=hidden, generator=generator)
        present = (candidates.ids() == target.unsqueeze(1)) & ~candidates.log_kappa().isneginf()
        count += present.sum(1)
        expected = (-candidates.target_log_kappa()).exp()
    assert torch.allclose(count / draws, expected, atol=0.05)
    assert expected[3] == 1


def test_explicit_sets_are_neither_indexed_nor_drawn():
    vectors, bias, weights, hidden = model()
    explicit = (hidden @ vectors.T + bias)[0].topk(3).indices
    sampler = Nearest(weights, 12, probes=ALL_LISTS)
    sampler.attach(vectors, bias)
    wrapped = WithExplicit(sampler, explicit)
    candidates = wrapped(torch.arange(B), hidden=hidden)
    assert not torch.isin(candidates.ids()[:, 3:], explicit).any()
    check_unbiased(wrapped, hidden, draws=1000)


def test_the_error_is_far_below_that_of_systematic_sampling():
    vectors, _, weights, _ = model()
    hidden, target = vectors, torch.arange(C)
    errors = {}
    for name, sampler in {"plain": Systematic(weights, 12), "nearest": Nearest(weights, 12, probes=ALL_LISTS)}.items():
        head = ClassHead(D, C, sampler=sampler, bias=False)
        with torch.no_grad():
            head.weight.copy_(vectors)
        errors[name] = diagnose(head, hidden, target, generator=torch.Generator().manual_seed(0)).rmse_log_z
    assert errors["nearest"] < 0.3 * errors["plain"]


def test_a_head_attaches_its_vectors_and_trains():
    _, _, weights, hidden = model()
    head = ClassHead(D, C, sampler=Nearest(ClassCounts(weights), 12, group_size=4, every=3))
    assert head.sampler.schedule.vectors == (head.weight, head.bias)
    optimizer = torch.optim.Adagrad(head.parameters(), lr=0.5)
    target = torch.arange(B)
    before = head.exact_loss(hidden, target).item()
    for _ in range(30):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
    assert head.exact_loss(hidden, target).item() < 0.2 * before
    twin = pickle.loads(pickle.dumps(copy.deepcopy(head)))
    assert twin.sampler.schedule.vectors[0] is twin.weight
    losses = [h(hidden, target, generator=torch.Generator().manual_seed(0)).item() for h in (head, twin)]
    assert losses[0] == losses[1]
    head.resize(C + 7)
    assert head.sampler.num_classes == C + 7
    assert head(hidden, target).isfinite()


def test_evaluations_do_not_advance_the_schedule():
    vectors, _, weights, hidden = model()
    sampler = Nearest(weights, 12, every=2)
    sampler.attach(vectors)
    for _ in range(5):
        sampler(torch.arange(B), hidden=hidden)
    assert sampler.schedule.steps == 0


def test_refresh_rebuilds_the_index_from_the_counts():
    vectors, bias, weights, hidden = model()
    counts = ClassCounts(weights)
    sampler = Nearest(counts, 12)
    sampler.attach(vectors, bias)
    sampler(torch.arange(B), hidden=hidden)
    counts.update(torch.full((500,), 7))
    sampler.refresh()
    # Class 7 is now drawn with probability 1, so it is not searched for.
    assert sampler(torch.arange(B), hidden=hidden).blocks[0].ids.tolist() == [[7]]
    check_unbiased(sampler, hidden, draws=1000)


def test_without_faiss_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"`Nearest` needs faiss: pip install 'manyclass\[ann\]'"):
        Nearest(torch.ones(5), 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Nearest(torch.ones(5), 6), r"`k` must be in \[2, 5\], got 6"),
        (lambda: Nearest(torch.ones(5), 1), r"`k` must be in \[2, 5\], got 1"),
        (lambda: Nearest(torch.ones(5), 4, nearest=4), r"`nearest` must be in \[1, 3\], got 4"),
        (lambda: Nearest(torch.ones(5), 4, group_size=0), r"`group_size` must be at least 1, got 0"),
        (lambda: Nearest(torch.ones(5), 4, probes=0), r"`probes` must be at least 1, got 0"),
        (lambda: Nearest(torch.ones(5), 4, lists=6), r"`lists` must be in \[1, 5\], got 6"),
        (lambda: Nearest(torch.ones(5), 4).attach(torch.ones(4, 2)), r"`weight` must have shape \[5, D\]"),
        (
            lambda: Nearest(torch.ones(5), 4).attach(torch.ones(5, 2), torch.ones(4)),
            r"`bias` must have shape \[5\], got \[4\]",
        ),
        (
            lambda: Nearest(ClassCounts(torch.tensor([1.0, 0.0, 1.0]), smoothing=0), 2)(torch.tensor([0])),
            r"`weights` must be above 0 for every class that is not explicit, got 0 at position 1",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
