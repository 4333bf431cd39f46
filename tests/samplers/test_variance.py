"""The variance of Z̃ agrees with theory, and a term is added to the paper's comparison of designs."""

import pytest
import torch

from manyclass.samplers import Bernoulli, Importance, Systematic
from tests import reference

C, S = 2000, 100
MU = 1.0


def sums(sampler, z, draws, generator):
    """Return Z̃ of independent draws, one for each example of a batch."""
    candidates = sampler(torch.zeros(draws, dtype=torch.int64), generator=generator)
    return (candidates.log_kappa().exp() * z[candidates.ids()]).sum(1)


def measured_variance(sampler, z, generator, draws=6000):
    return float(sums(sampler, z, draws, generator).var())


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_importance_has_the_variance_of_its_formula(power):
    generator = torch.Generator().manual_seed(1)
    z = torch.rand(C, dtype=torch.float64, generator=generator)
    weights = torch.rand(C, dtype=torch.float64, generator=generator) + 0.1
    q = (weights**power / (weights**power).sum()).tolist()
    theory = reference.importance_variance(z.tolist(), q, S)
    sampler = Importance(weights, S, power=power, group_size=1)
    assert measured_variance(sampler, z, generator) == pytest.approx(theory, rel=0.08)


def test_bernoulli_has_the_variance_of_its_formula():
    generator = torch.Generator().manual_seed(2)
    z = torch.rand(C, dtype=torch.float64, generator=generator)
    weights = torch.rand(C, dtype=torch.float64, generator=generator) + 0.1
    theory = reference.bernoulli_variance(z.tolist(), reference.bernoulli_probabilities(weights.tolist(), S))
    sampler = Bernoulli(weights, S, group_size=1)
    assert measured_variance(sampler, z, generator) == pytest.approx(theory, rel=0.08)


def exact_systematic_variance(z):
    """Return the variance over the C/S samples that uniform weights allow: every C/S-th class from each start."""
    return float((z.reshape(S, C // S).sum(0) * (C / S)).var(correction=0))


def test_uniform_systematic_draws_every_twentieth_class():
    sampler = Systematic(torch.ones(C), S, group_size=1)
    rows = sampler(torch.zeros(200, dtype=torch.int64), generator=torch.Generator().manual_seed(0)).ids()
    assert (rows.diff(dim=1) == C // S).all()
    assert set(rows[:, 0].tolist()) == set(range(C // S))


@pytest.mark.parametrize("ratio", [0.2, 1.0, 3.0])
def test_expected_variances_agree_with_the_footnote_and_its_missing_term(ratio):
    """Systematic sampling has the least expected variance for z of mean μ and deviation σ.

    It is σ²(C²/S)(1-S/C), beside σ²C(C-1)/S for importance and (σ²+μ²)C(1/f-1) for Bernoulli sampling.
    """
    generator = torch.Generator().manual_seed(3)
    sigma, f, repeats = ratio * MU, S / C, 400
    importance, bernoulli, systematic = [], [], []
    for _ in range(repeats):
        # A shifted exponential has mean μ and deviation σ, and is positive if σ ≤ μ.
        z = MU + sigma * (torch.empty(C, dtype=torch.float64).exponential_(generator=generator) - 1)
        importance.append(float((z.square().sum() * C - z.sum() ** 2) / S))
        bernoulli.append(float((1 / f - 1) * z.square().sum()))
        systematic.append(exact_systematic_variance(z))
    expected = {
        "importance": sigma**2 * C * (C - 1) / S,
        "bernoulli": (sigma**2 + MU**2) * C * (1 / f - 1),
        "systematic": sigma**2 * C**2 / S * (1 - S / C),
    }
    for name, values in {"importance": importance, "bernoulli": bernoulli, "systematic": systematic}.items():
        values = torch.tensor(values, dtype=torch.float64)
        error = float(values.std()) / repeats**0.5
        assert abs(float(values.mean()) - expected[name]) < 4 * error, name
    assert expected["systematic"] < min(expected["importance"], expected["bernoulli"])
    assert (expected["bernoulli"] > expected["importance"]) == (ratio**2 < (C - S) / (S - 1))


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_bernoulli_varies_more_than_importance_although_the_paper_says_less(ratio):
    generator = torch.Generator().manual_seed(4)
    z = MU + ratio * MU * (torch.empty(C, dtype=torch.float64).exponential_(generator=generator) - 1)
    uniform = torch.ones(C)
    importance = measured_variance(Importance(uniform, S, group_size=1), z, generator)
    bernoulli = measured_variance(Bernoulli(uniform, S, group_size=1), z, generator)
    assert importance < bernoulli
