"""WithExplicit: explicit classes are always scored, once, and the rest is drawn."""

import torch

from manyclass.samplers import Importance, Systematic, WithExplicit
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
