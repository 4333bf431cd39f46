"""Samplers are unbiased: E[Σ κ g(id)] over the slots not excluded is the sum of g over the classes not excluded."""

import itertools

import pytest
import torch

from manyclass import ClassCounts
from manyclass.samplers import Bernoulli, Importance, Systematic, WithExplicit
from tests import reference
from tests.outcomes import outcomes
from tests.tables import DESIGNS, DRAWING, SAMPLERS

C = 4
GROUP_SIZES = (None, 1, 2, 3)
SUBSETS = [torch.tensor(s) for n in range(1, C + 1) for s in itertools.combinations(range(C), n)]
# There is one example for each set of excluded classes, so that one call tests all of them.
EXCLUDED = torch.tensor([[c if bits >> c & 1 else -1 for c in (2, 0, 3, 1)] for bits in range(2**C)])
TARGET = torch.tensor([1, 3] * 2 ** (C - 1))
# Each example also includes another set, in another order, with repeats and classes that it excludes.
INCLUDED = torch.cat([EXCLUDED.roll(5, 0), EXCLUDED.roll(5, 0).flip(1)[:, :2]], 1)
COUNTS = {"ties": [3, 1, 1, 3], "zeros": [5, 0, 2, 0], "skewed": [1, 40, 2, 7]}


def expectation(sampler, weights, g, include=None):
    """Return the sum over all outcomes of probability × Σ κ g, for each example."""
    total, mass = torch.zeros(len(TARGET), dtype=torch.float64), 0.0
    for probability, candidates in outcomes(sampler, weights, TARGET, EXCLUDED, include):
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        total += probability * (kappa * g[candidates.ids()]).sum(1)
        if include is not None:
            assert_each_is_certain_once(candidates, include)
        mass += probability
    assert mass == pytest.approx(1, abs=1e-9)
    return total


def assert_each_is_certain_once(candidates, include):
    """Assert that every class that an example includes and does not exclude has one slot, with κ = 1."""
    kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
    counted = torch.zeros(len(include), C, dtype=torch.float64).scatter_add_(1, candidates.ids(), kappa)
    for own, included, excluded in zip(counted, include.tolist(), EXCLUDED.tolist(), strict=True):
        for c in set(included) - {-1}:
            assert own[c] == (c not in excluded)


def exact_sums(g):
    kept = torch.ones(len(TARGET), C + 1, dtype=torch.float64).scatter_(1, EXCLUDED % (C + 1), 0.0)[:, :C]
    return kept @ g


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("k", range(1, C + 1))
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_is_unbiased_for_every_explicit_and_excluded_set(name, k, group_size, counts):
    counts = ClassCounts(torch.tensor(counts))
    weights = counts.weights()
    g = torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    sampler = DESIGNS[name](counts, k, group_size)
    for explicit in [None, "batch", *SUBSETS]:
        left = weights.clone()
        if explicit is None:
            composed = sampler
        else:
            composed = WithExplicit(sampler, explicit)
            if explicit != "batch":
                left[explicit] = 0.0
        torch.testing.assert_close(expectation(composed, left.tolist(), g), exact_sums(g), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_is_unbiased_with_included_classes(name, k, group_size):
    counts = ClassCounts(torch.tensor(COUNTS["skewed"]))
    g = torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    sampler = DESIGNS[name](counts, k, group_size)
    for explicit in (None, "batch", torch.tensor([0, 3])):
        left = counts.weights().clone()
        if isinstance(explicit, torch.Tensor):
            left[explicit] = 0.0
        composed = sampler if explicit is None else WithExplicit(sampler, explicit)
        found = expectation(composed, left.tolist(), g, INCLUDED)
        torch.testing.assert_close(found, exact_sums(g), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_bernoulli_with_given_probabilities_is_unbiased(group_size):
    b = [0.3, 1.0, 0.5, 0.9]
    g = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    sampler = Bernoulli.from_probabilities(torch.tensor(b, dtype=torch.float64), group_size=group_size)
    torch.testing.assert_close(expectation(sampler, b, g), exact_sums(g), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_nested_explicit_sets_are_unbiased(group_size):
    weights = torch.tensor([2.0, 1.0, 5.0, 3.0], dtype=torch.float64)
    g = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    inner = WithExplicit(Importance(weights, 2, group_size=group_size), torch.tensor([2]))
    left = [2.0, 1.0, 0.0, 3.0]
    torch.testing.assert_close(expectation(WithExplicit(inner, "batch"), left, g), exact_sums(g), rtol=1e-9, atol=1e-9)


# A set alone is biased, and InBatch, unbiased only over random batches, is tested in a separate file.
TESTED_ELSEWHERE = ("set alone", "in batch")


@pytest.mark.parametrize("include", [None, torch.tensor([[2, 2, -1], [0, 4, 5], [1, 2, 5]] * 2)], ids=["", "include"])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in (*DESIGNS, *TESTED_ELSEWHERE)])
def test_every_other_sampler_is_unbiased_on_average(name, include):
    weights = torch.tensor([2.0, 1.0, 5.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    sampler = SAMPLERS[name](weights, 2, 1)
    assert sampler.unbiased
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(6).repeat(100)
    g = torch.tensor([1.0, 0.5, 3.0, 0.25, 2.0, 0.0], dtype=torch.float64)
    errors = []
    include = None if include is None else include.repeat(100, 1)
    for _ in range(50):
        candidates = sampler(target, include=include, exclude=target.unsqueeze(1), generator=generator)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        errors.append((kappa * g[candidates.ids()]).sum(1) - (g.sum() - g[target]))
    error = torch.cat(errors)
    assert abs(error.mean()) <= 4.5 * error.std() / len(error) ** 0.5 + 1e-12


def test_a_set_alone_is_marked_as_biased():
    assert not WithExplicit(None, torch.tensor([0]), num_classes=3).unbiased


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("name", ["systematic", "bernoulli"])
def test_a_draw_of_all_classes_without_replacement_is_exact(name, group_size):
    weights = torch.rand(50, generator=torch.Generator().manual_seed(0)) + 0.01
    sampler = DRAWING[name](weights, 50, group_size)
    candidates = sampler(torch.arange(7))
    kept = ~candidates.empty()
    for row, log_kappa, present in zip(candidates.ids(), candidates.log_kappa(), kept, strict=True):
        assert sorted(row[present].tolist()) == list(range(50))
        assert (log_kappa[present] == 0).all()


# For a thousand classes, standard errors come from the known variance of each design.
N, K, DRAWS = 1000, 60, 4000


def zipf():
    return [1 / (c + 1) for c in range(N)]


def known_variance(name, z, weights, k):
    if name == "importance":
        return reference.importance_variance(z, [w / sum(weights) for w in weights], k)
    if name == "bernoulli":
        return reference.bernoulli_variance(z, reference.bernoulli_probabilities(weights, k))
    return reference.systematic_variance(z, reference.inclusion_probabilities(weights, k))


@pytest.mark.parametrize("group_size", [1, 7])
@pytest.mark.parametrize("name", DRAWING)
def test_mean_and_variance_of_sums_agree_with_the_known_variance(name, group_size):
    generator = torch.Generator().manual_seed(5)
    weights = zipf()
    z = torch.rand(N, dtype=torch.float64, generator=generator) * torch.tensor(weights, dtype=torch.float64).sqrt()
    excluded = torch.tensor([0, 3, 500])
    z[excluded] = 0.0
    sampler = DRAWING[name](torch.tensor(weights, dtype=torch.float64), K, group_size)
    batch = DRAWS * group_size
    target = torch.zeros(batch, dtype=torch.int64)
    candidates = sampler(target, exclude=excluded.expand(batch, -1), generator=generator)
    kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
    estimate = (kappa * z[candidates.ids()]).sum(1).reshape(DRAWS, group_size)[:, 0]
    left = list(weights)
    if name == "importance" and group_size == 1:
        for c in excluded.tolist():
            left[c] = 0.0
    error = (known_variance(name, z.tolist(), left, K) / DRAWS) ** 0.5
    assert abs(estimate.mean() - z.sum()) < 4 * error
    assert estimate.var().item() == pytest.approx(error**2 * DRAWS, rel=0.15)


@pytest.mark.parametrize("group_size", [None, 1])
def test_systematic_draws_k_distinct_classes(group_size):
    sampler = Systematic(torch.tensor(zipf()), K, group_size=group_size)
    for seed in range(20):
        candidates = sampler(torch.tensor([5, 6]), generator=torch.Generator().manual_seed(seed))
        for row in candidates.ids():
            assert len(set(row.tolist())) == K == len(row)
