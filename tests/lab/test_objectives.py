"""The lab's objectives compute the formulas in their docstrings."""

import math

import pytest
import torch

from manyclass.lab.objectives import AdaptedImportance, TaylorInverse, UpperBound
from manyclass.samplers import Bernoulli, Exhaustive, Importance


def scored(sampler, scores, target, *, keeps_hits=False):
    exclude = None if keeps_hits else target.unsqueeze(1)
    candidates = sampler(target, exclude=exclude, generator=torch.Generator().manual_seed(0))
    slots = scores.gather(1, candidates.ids()).masked_fill(candidates.empty(), -math.inf)
    return scores.gather(1, target.unsqueeze(1)).squeeze(1), slots, candidates


def test_the_expansion_is_unbiased_where_it_converges():
    torch.manual_seed(0)
    examples, num_classes, draws = 200_000, 12, 8
    scores = (0.3 * torch.randn(1, num_classes, dtype=torch.float64)).expand(examples, -1)
    target = torch.zeros(examples, dtype=torch.long)
    sampler = Importance(torch.ones(num_classes), 6 * draws, group_size=1)
    own, slots, candidates = scored(sampler, scores, target)
    gamma_target, gamma = TaylorInverse(draws).gamma(own, slots, candidates)
    exact = scores[0].softmax(0)
    # The plain plug-in would be off by Var(Z̃)/Z², about 0.008 of p here.
    error = float(gamma_target.std()) / examples**0.5
    assert abs(float(gamma_target.mean()) - (1 - float(exact[0]))) < 4 * error
    ids = candidates.ids()[:, -gamma.shape[1] :]
    mean = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, ids.flatten(), gamma.flatten()) / examples
    assert torch.allclose(mean[1:], -exact[1:], atol=2e-3)


def test_the_gradient_of_the_expansions_loss_is_its_gamma():
    torch.manual_seed(0)
    target = torch.tensor([1, 4])
    own, slots, candidates = scored(Importance(torch.ones(9), 12, group_size=1), torch.randn(2, 9).double(), target)
    own.requires_grad_()
    slots.requires_grad_()
    objective = TaylorInverse(3)
    one, others = torch.autograd.grad(objective(own, slots, candidates).sum(), (own, slots))
    gamma_target, gamma = objective.gamma(own.detach(), slots.detach(), candidates)
    assert torch.allclose(one, -gamma_target)
    assert torch.allclose(others[:, -4:], -gamma)
    assert not others[:, :-4].any()


def test_the_expansion_has_no_place_for_included_classes():
    target = torch.tensor([1, 4])
    candidates = Importance(torch.ones(9), 9, group_size=1)(target, include=torch.tensor([[2, 3, 5]] * 2))
    with pytest.raises(ValueError, match="`include` must be None for TaylorInverse, got classes that belong to no"):
        TaylorInverse(3)(torch.zeros(2), torch.zeros(2, 12), candidates)


def test_the_bound_of_all_classes_is_exact():
    scores, target = torch.randn(3, 7).double(), torch.tensor([0, 3, 6])
    own, slots, candidates = scored(Exhaustive(7), scores, target)
    assert torch.allclose(UpperBound()(own, slots, candidates), scores.logsumexp(1) - own)


def test_the_bound_is_above_z_in_expectation():
    torch.manual_seed(0)
    examples = 20_000
    scores, target = torch.randn(1, 7).double().expand(examples, -1), torch.zeros(examples, dtype=torch.long)
    sampler = Bernoulli.from_probabilities(torch.full((7,), 0.5), group_size=1)
    own, slots, candidates = scored(sampler, scores, target)
    bound = (UpperBound()(own, slots, candidates) + own).exp()
    # By hand: each of the 6 other classes contributes 1 or exp(2 s), with probability one half each.
    others = scores[0, 1:]
    expected = scores[0, 0].exp() + ((2 * others).exp() / 2 + 0.5).sum()
    assert abs(float(bound.mean() - expected)) < 4 * float(bound.std()) / examples**0.5
    assert float(expected) > float(scores[0].exp().sum())


def test_the_proposal_moves_towards_the_model():
    torch.manual_seed(0)
    sampler = Importance(torch.ones(20), 10, group_size=1)
    objective = AdaptedImportance(sampler, forget=0.2, every=1)
    scores = torch.zeros(64, 20).double()
    scores[:, 7] = 3.0
    for _ in range(40):
        own, slots, candidates = scored(sampler, scores, torch.zeros(64, dtype=torch.long), keeps_hits=True)
        objective(own, slots, candidates)
    q = sampler.table.mass(torch.arange(20))
    q = q / q.sum()
    # Half uniform, half the model's probability of class 7, exp(3) / (19 + exp(3)).
    assert abs(float(q[7]) - (0.5 / 20 + 0.5 * math.exp(3) / (19 + math.exp(3)))) < 0.06
