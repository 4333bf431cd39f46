"""Bernoulli: each class is drawn independently, with a probability proportional to its count."""

import pytest
import torch

from manyclass import ClassCounts
from manyclass.samplers import Bernoulli, Systematic
from tests import reference

C = 40


def weights():
    return torch.rand(C, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4 + 1e-3


def inclusion_probabilities(sampler):
    return (-sampler(torch.arange(sampler.num_classes)).target_log_kappa()).exp()


@pytest.mark.parametrize("k", [1, 5, 20, 39, 40])
def test_inclusion_probabilities_are_capped_at_one_and_sum_to_k(k):
    sampler = Bernoulli.proportional(weights(), k)
    pi = torch.tensor(reference.inclusion_probabilities(weights().tolist(), k), dtype=torch.float64)
    torch.testing.assert_close(inclusion_probabilities(sampler), pi, rtol=1e-9, atol=1e-12)
    assert pi.sum() == pytest.approx(k)
    # Systematic sampling has the same inclusion probabilities.
    torch.testing.assert_close(inclusion_probabilities(Systematic(weights(), k)), pi, rtol=1e-9, atol=1e-12)


def test_classes_are_drawn_independently_with_their_probabilities():
    sampler = Bernoulli.proportional(weights(), 8, group_size=1)
    pi, draws = inclusion_probabilities(sampler), 4000
    candidates = sampler(torch.zeros(draws, dtype=torch.int64), generator=torch.Generator().manual_seed(1))
    kept = torch.zeros(draws, C, dtype=torch.float64)
    kept.scatter_add_(1, candidates.ids(), (~candidates.empty()).double())
    assert (kept <= 1).all()
    error = (pi * (1 - pi) / draws).sqrt()
    assert ((kept.mean(0) - pi).abs() <= 4.5 * error + 1e-12).all()
    assert kept.sum(1).var().item() == pytest.approx(float((pi * (1 - pi)).sum()), rel=0.1)


def test_the_variance_is_below_the_papers_if_weights_equal_the_terms():
    z = weights()
    proportional, power = (inclusion_probabilities(make(z, 8)) for make in (Bernoulli.proportional, Bernoulli))
    variances = [reference.bernoulli_variance(z.tolist(), b.tolist()) for b in (proportional, power)]
    assert variances[0] < 0.6 * variances[1]


def test_refresh_and_resize_follow_the_counts():
    counts = ClassCounts.streaming(C)
    sampler = Bernoulli.proportional(counts, 8)
    counts.update(torch.arange(10).repeat_interleave(torch.arange(10)))
    sampler.refresh()
    pi = torch.tensor(reference.inclusion_probabilities(counts.weights().tolist(), 8), dtype=torch.float64)
    torch.testing.assert_close(inclusion_probabilities(sampler), pi, rtol=1e-9, atol=1e-12)
    assert sampler.heaviest(3).tolist() == [7, 8, 9]
    sampler.resize(C + 5)
    assert inclusion_probabilities(sampler).sum().item() == pytest.approx(8)
    rest = sampler.without(torch.tensor([9, 3]))
    left = counts.weights()
    left[[9, 3]] = 0.0
    pi = torch.tensor(reference.inclusion_probabilities(left.tolist(), 8), dtype=torch.float64)
    torch.testing.assert_close(inclusion_probabilities(rest), pi, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [Bernoulli, Bernoulli.proportional])
def test_k_can_be_changed(make):
    sampler = make(weights(), 8)
    sampler.set_k(20)
    assert sampler.k == 20
    torch.testing.assert_close(inclusion_probabilities(sampler), inclusion_probabilities(make(weights(), 20)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli.proportional(torch.ones(5), 6), r"`k` must be in \[1, 5\], got 6"),
        (
            lambda: Bernoulli.proportional(ClassCounts(torch.tensor([1.0, 0.0, 1.0]), smoothing=0), 2)(
                torch.tensor([0])
            ),
            r"`weights` must be above 0 for every class that is not explicit, got 0 at position 1",
        ),
        (
            lambda: Bernoulli.from_probabilities(torch.ones(5)).set_k(3),
            r"`k` must not be set for a sampler built from probabilities, got 3",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
