"""Errors about options and gradients name them."""

import math

import pytest
import torch

from manyclass.optim import RowAdagrad, RowAdam, RowSGD, clip_grad_norm_
from tests.optim.tables import OURS, parameters

REFUSED = {
    "negative lr": (lambda p: RowSGD(p, -0.1), "`lr` must be finite and at least 0, got -0.1"),
    "NaN lr": (lambda p: RowAdam(p, math.nan), "`lr` must be finite and at least 0, got nan"),
    "infinite lr": (lambda p: RowAdagrad(p, math.inf), "`lr` must be finite and at least 0, got inf"),
    "momentum of 1": (lambda p: RowSGD(p, 0.1, momentum=1.0), r"`momentum` must lie in \[0, 1\), got 1.0"),
    "negative momentum": (lambda p: RowSGD(p, 0.1, momentum=-0.5), r"`momentum` must lie in \[0, 1\), got -0.5"),
    "negative decay": (lambda p: RowSGD(p, 0.1, weight_decay=-1), "`weight_decay` must be .* at least 0, got -1"),
    "negative start": (
        lambda p: RowAdagrad(p, initial_accumulator_value=-1.0),
        "`initial_accumulator_value` must be .* at least 0, got -1.0",
    ),
    "negative eps": (lambda p: RowAdagrad(p, eps=-1e-8), "`eps` must be .* at least 0, got -1e-08"),
    "negative eps, Adam": (lambda p: RowAdam(p, eps=-1e-8), "`eps` must be .* at least 0, got -1e-08"),
    "first beta": (lambda p: RowAdam(p, betas=(1.0, 0.9)), r"`betas\[0\]` must lie in \[0, 1\), got 1.0"),
    "second beta": (lambda p: RowAdam(p, betas=(0.9, -0.1)), r"`betas\[1\]` must lie in \[0, 1\), got -0.1"),
    "three betas": (lambda p: RowAdam(p, betas=(0.9, 0.9, 0.9)), r"`betas` must be two numbers, got \(0.9, 0.9, 0.9\)"),
    "a group's lr": (lambda p: RowSGD([{"params": p, "lr": -1.0}], 0.1), "`lr` must be .* at least 0, got -1.0"),
    "negative norm": (lambda p: clip_grad_norm_(p, -1.0), "`max_norm` must be .* at least 0, got -1.0"),
    "norm of order 0": (lambda p: clip_grad_norm_(p, 1.0, norm_type=0.0), "`norm_type` must be .* above 0, got 0.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_out_of_range_is_named(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(parameters())


def test_a_learning_rate_is_a_number():
    with pytest.raises(TypeError, match=r"`lr` must be a number, got '0.1'"):
        RowSGD(parameters(), "0.1")


@pytest.mark.parametrize("name", OURS)
def test_a_gradient_sparse_in_more_than_its_rows_is_refused(name):
    weight, _ = parameters()
    optimizer = OURS[name]([weight])
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[0], [1]]), torch.ones(1).to(weight), weight.shape, check_invariants=True
    )
    with pytest.raises(ValueError, match=r"`grad` must be sparse in its rows alone \(sparse_dim 1\), got sparse_dim 2"):
        optimizer.step()
    with pytest.raises(ValueError, match="`grad` must be sparse in its rows alone"):
        clip_grad_norm_([weight], 1.0)
