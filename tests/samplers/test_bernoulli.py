"""Coins whose probabilities are proportional to size."""

import pytest
import torch

from manyclass import ClassCounts
from manyclass.samplers import Bernoulli, Systematic
from tests import reference

C = 40


def weights():
    return torch.rand(C, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4 + 1e-3


def probabilities(sampler):
    return (-sampler(torch.arange(sampler.num_classes)).target_log_kappa()).exp()


@pytest.mark.parametrize("k", [1, 5, 20, 39, 40])
def test_probabilities_are_capped_at_one_and_sum_to_k(k):
    sampler = Bernoulli.proportional(weights(), k)
    pi = torch.tensor(reference.inclusion_probabilities(weights().tolist(), k), dtype=torch.float64)
    torch.testing.assert_close(probabilities(sampler), pi, rtol=1e-9, atol=1e-12)
    assert pi.sum() == pytest.approx(k)
    # As those of a fixed number of classes.
    torch.testing.assert_close(probabilities(Systematic(weights(), k)), pi, rtol=1e-9, atol=1e-12)


def test_classes_are_kept_so_often_and_independently():
    sampler = Bernoulli.proportional(weights(), 8, group_size=1)
    pi, draws = probabilities(sampler), 4000
    candidates = sampler(torch.zeros(draws, dtype=torch.int64), generator=torch.Generator().manual_seed(1))
    kept = torch.zeros(draws, C, dtype=torch.float64)
    kept.scatter_add_(1, candidates.ids(), (~candidates.empty()).double())
    assert (kept <= 1).all()
    error = (pi * (1 - pi) / draws).sqrt()
    assert ((kept.mean(0) - pi).abs() <= 4.5 * error + 1e-12).all()
    assert kept.sum(1).var().item() == pytest.approx(float((pi * (1 - pi)).sum()), rel=0.1)


def test_its_variance_is_below_that_of_the_papers_probabilities_where_sizes_are_right():
    z = weights()
    proportional, power = (probabilities(make(z, 8)) for make in (Bernoulli.proportional, Bernoulli))
    variances = [reference.bernoulli_variance(z.tolist(), b.tolist()) for b in (proportional, power)]
    assert variances[0] < 0.6 * variances[1]


def test_it_follows_counts_and_their_number():
    counts = ClassCounts.streaming(C)
    sampler = Bernoulli.proportional(counts, 8)
    counts.update(torch.arange(10).repeat_interleave(torch.arange(10)))
    sampler.refresh()
    pi = torch.tensor(reference.inclusion_probabilities(counts.weights().tolist(), 8), dtype=torch.float64)
    torch.testing.assert_close(probabilities(sampler), pi, rtol=1e-9, atol=1e-12)
    assert sampler.heaviest(3).tolist() == [7, 8, 9]
    sampler.resize(C + 5)
    assert probabilities(sampler).sum().item() == pytest.approx(8)
    rest = sampler.without(torch.tensor([9, 3]))
    left = counts.weights()
    left[[9, 3]] = 0.0
    pi = torch.tensor(reference.inclusion_probabilities(left.tolist(), 8), dtype=torch.float64)
    torch.testing.assert_close(probabilities(rest), pi, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [Bernoulli, Bernoulli.proportional])
def test_the_number_kept_can_be_changed(make):
    sampler = make(weights(), 8)
    sampler.set_k(20)
    assert sampler.k == 20
    torch.testing.assert_close(probabilities(sampler), probabilities(make(weights(), 20)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bernoulli.proportional(torch.ones(5), 6), r"`k` must be in \[1, 5\], got 6"),
        (
            lambda: Bernoulli.proportional(torch.tensor([1.0, 0.0, 1.0]), 2)(torch.tensor([0])),
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
