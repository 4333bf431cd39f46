"""clip_grad_norm_ equals torch's, for sparse gradients as well."""

import copy
import math

import pytest
import torch

from manyclass.optim import clip_grad_norm_
from tests.optim.tables import parameters, same, set_gradients

IDS = torch.tensor([4, 1, 4, 4, 7])


def mixed(dtype=torch.float64):
    """Return a weight with a sparse gradient, a bias with a dense one and a parameter without any."""
    params = parameters(dtype)
    set_gradients(params, IDS, 0)
    params[1].grad = params[1].grad.to_dense()
    return [*params, torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_it_equals_torchs_on_dense_gradients(max_norm, norm_type, dtype):
    params = mixed(dtype)
    theirs = copy.deepcopy(params)
    for p, q in zip(params, theirs, strict=True):
        q.grad = None if p.grad is None else p.grad.to_dense().clone()
    norm = clip_grad_norm_(params, max_norm, norm_type=norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
    same([norm, *(p.grad.to_dense() for p in params[:2])], [expected, *(q.grad for q in theirs[:2])])
    assert params[2].grad is None


def test_gradients_stay_coalesced_for_the_optimiser():
    params = mixed()
    clip_grad_norm_(iter(params), 1.0)
    assert params[0].grad.is_sparse
    assert params[0].grad.is_coalesced()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_may_be_empty_or_none(norm_type):
    params = parameters()
    assert clip_grad_norm_(params, 1.0, norm_type=norm_type) == 0
    set_gradients(params, torch.tensor([], dtype=torch.int64), 0)
    assert clip_grad_norm_(params, 1.0, norm_type=norm_type) == 0
    set_gradients(params[:1], IDS, 0)
    assert clip_grad_norm_(params, 1.0, norm_type=norm_type) > 0
    assert clip_grad_norm_(params[0], 1.0, norm_type=norm_type) <= 1


def test_a_norm_that_is_not_finite_raises_only_if_asked():
    params = mixed()
    params[0].grad._values()[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(params, 1.0) == torch.inf
