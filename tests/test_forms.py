"""A transform of the target's score reaches every place where a form uses it."""

import math

import pytest
import torch

from manyclass.candidates import Block, Candidates
from manyclass.forms import LogSumExp, PairSum

FORMS = {
    "log-sum-exp": LogSumExp(target=True, kappa=True),
    "without the target": LogSumExp(target=False, kappa=True),
    "pairs": PairSum("softplus", paired=True),
    "positive": PairSum("relu", positive=True, kappa=True),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_transform_gives_the_loss_of_the_transformed_score(name):
    block = Block(torch.tensor([[1, 2, 3]]), torch.tensor([[0.3, -0.2, -math.inf]], dtype=torch.float64))
    log_kappa = torch.tensor([0.4, 0.1], dtype=torch.float64)
    candidates = Candidates((block,), torch.empty(2, 0, dtype=torch.int64), lambda: log_kappa, 4)
    target_score, scores = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    form = FORMS[name]
    options = {**vars(form), "target_transform": lambda score: 2 * score - 0.35}
    losses = type(form)(**options).loss(target_score, scores, candidates)
    assert torch.equal(losses, form.loss(2 * target_score - 0.35, scores, candidates))
    assert not torch.equal(losses, form.loss(target_score, scores, candidates))
