"""WithExplicit: explicit classes are always scored, once, and the rest is drawn."""

from types import SimpleNamespace

import pytest
import torch

from manyclass.samplers import Exhaustive, Importance, Systematic, WithExplicit, draw_including
from tests.samplers.test_state import draw


def test_explicit_classes_are_not_drawn_again():
    explicit = torch.tensor([0, 5])
    sampler = WithExplicit(Importance(torch.ones(9), 50), explicit)
    ids, log_kappa = draw(sampler)
    assert not torch.isin(ids[:, 2:], explicit).any()
    assert (log_kappa[:, :2] == 0).all()


def test_a_class_of_weight_zero_can_be_explicit():
    weights = torch.ones(9)
    weights[3] = 0
    sampler = WithExplicit(Systematic(weights, 4), torch.tensor([3]))
    ids, _ = draw(sampler)
    assert (ids[:, 0] == 3).all()


def test_a_budget_is_split_between_the_heaviest_classes_and_the_draw():
    weights = torch.tensor([1.0, 9.0, 2.0, 8.0, 3.0, 1.0, 1.0, 1.0, 1.0])
    sampler = WithExplicit.budget(Systematic(weights, 3), 5)
    candidates = sampler(torch.tensor([0]))
    assert candidates.ids().shape[1] == 5
    assert candidates.ids()[0, :2].tolist() == [1, 3]


@pytest.mark.parametrize("explicit", ["batch", torch.tensor([2, 6])])
def test_classes_that_the_inner_sampler_includes_count_once(explicit):
    """Every class counts once, be it drawn, explicit, included by the inner sampler or by the user."""
    inner, own = Exhaustive(9), torch.tensor([[2, 3], [5, -1]])
    plain = SimpleNamespace(draw=inner.draw)
    inner.draw = lambda target, exclude, **options: draw_including(plain, target, own, exclude, **options)
    target, exclude = torch.tensor([2, 5]), torch.tensor([[1, 4], [5, -1]])
    for include in (None, torch.tensor([[3, 7], [6, 0]])):
        candidates = WithExplicit(inner, explicit)(target, include=include, exclude=exclude)
        assert candidates.included.shape[1] == (2 if include is None else 4)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        counted = torch.zeros(2, 9, dtype=torch.float64).scatter_add_(1, candidates.ids(), kappa)
        assert counted.tolist() == [[1, 0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]]
