"""The likelihood's γ is bounded and has the right sign, as the paper proves; that of plain importance is not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import ClassHead
from manyclass.candidates import Block, Candidates
from manyclass.objectives import Likelihood, LogisticRanking, PlainImportance
from manyclass.samplers import Importance
from tests.tables import SAMPLERS

C, D, B = 30, 5, 6


@pytest.mark.parametrize("group_size", [None, 1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.floats(0.0, 30.0), k=st.integers(1, C - 2))
def test_gamma_is_bounded_and_never_has_the_wrong_sign(name, group_size, seed, scale, k):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(C, generator=generator) ** 3 + 1e-3
    sampler = SAMPLERS[name](weights, k, group_size)
    target = torch.randint(0, C, (B,), generator=generator)
    candidates = sampler(target, exclude=target.unsqueeze(1), generator=generator)
    all_scores = scale * torch.randn(B, C, dtype=torch.float64, generator=generator)
    target_score = all_scores.gather(1, target.unsqueeze(1)).squeeze(1).requires_grad_()
    ids = candidates.ids()
    scores = all_scores.gather(1, ids).masked_fill(candidates.hits(ids), -math.inf).requires_grad_()
    loss = Likelihood()(target_score, scores, candidates)
    gradients = torch.autograd.grad(loss.sum(), (target_score, scores))
    gamma = torch.zeros(B, C, dtype=torch.float64).scatter_add_(1, ids, -gradients[1])
    gamma.scatter_add_(1, target.unsqueeze(1), -gradients[0].unsqueeze(1))
    assert (gamma.abs() <= 1 + 1e-12).all()
    own = gamma.gather(1, target.unsqueeze(1))
    assert (own >= 0).all()
    others = gamma.scatter(1, target.unsqueeze(1), 0.0)
    assert (others <= 0).all()
    exact = -all_scores.softmax(1)
    exact.scatter_add_(1, target.unsqueeze(1), torch.ones(B, 1, dtype=torch.float64))
    assert (gamma * exact >= -1e-15).all()
    assert (loss >= -1e-12).all()


def test_plain_importance_sampling_goes_below_zero_and_its_plug_in_below_minus_one():
    # The draw missed the likely target: Z̃ = 2 u(1) is far below u(target).
    block = Block(torch.tensor([[1]]), torch.tensor([[math.log(2.0)]], dtype=torch.float64))
    candidates = Candidates((block,), torch.empty(1, 0, dtype=torch.int64), None, 2)
    target_score = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([[0.0]], dtype=torch.float64, requires_grad=True)
    loss = PlainImportance()(target_score, scores, candidates)
    plug_in = 1 - math.exp(3.0) / 2.0
    assert loss.item() < 0
    assert plug_in < -1
    # The weights that autograd finds are self-normalised and stay within bounds.
    gradients = torch.autograd.grad(loss.sum(), (target_score, scores))
    assert all((g.abs() <= 1).all() for g in gradients)
    assert Likelihood()(target_score, scores, candidates).item() > 0


def test_ranking_with_the_default_margin_is_the_likelihood_of_one_uniform_draw():
    torch.manual_seed(0)
    hidden = torch.randn(40, D, dtype=torch.float64)
    target = torch.randint(0, C, (40,))
    results = []
    for objective in (LogisticRanking(), Likelihood()):
        sampler = Importance(torch.ones(C), 1, group_size=1)
        head = ClassHead(D, C, sampler=sampler, objective=objective, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(torch.randn(C, D, generator=torch.Generator().manual_seed(1)))
            head.bias.copy_(torch.randn(C, generator=torch.Generator().manual_seed(2)))
        x = hidden.clone().requires_grad_()
        loss = head(x, target, reduction="none", generator=torch.Generator().manual_seed(3))
        results.append((loss, *torch.autograd.grad(loss.sum(), (x, head.weight, head.bias))))
    for ranking, likelihood in zip(*results, strict=True):
        torch.testing.assert_close(ranking, likelihood, rtol=0, atol=1e-12)
