"""clip_grad_norm_ equals torch's, for sparse gradients as well."""

import copy
import math

import pytest
import torch

from manyclass import ClassHead
from manyclass.optim import clip_grad_norm_
from manyclass.samplers import Systematic
from tests.optim.tables import C, D, parameters, same, set_gradients

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


CLIPS = {
    "ours": lambda weight: clip_grad_norm_(weight, 20.0),
    "torch, norm": lambda weight: torch.nn.utils.clip_grad_norm_(weight, 20.0),
    "torch, value": lambda weight: torch.nn.utils.clip_grad_value_(weight, 10.0),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CLIPS)
def test_many_small_rows_in_half_precision_are_summed_in_float32(name, dtype):
    weight = torch.nn.Parameter(torch.zeros(C, D, dtype=dtype))
    ids, rows = torch.zeros(1, 4096, dtype=torch.int64), torch.full((4096, D), 2.0**-8, dtype=dtype)
    weight.grad = torch.sparse_coo_tensor(ids, rows, weight.shape, check_invariants=False)
    norm = CLIPS[name](weight)
    # The sum is 16 in each element; in 16 bits it would stop at 1 or 8.
    if norm is not None:
        assert norm.item() == pytest.approx(16 * D**0.5, rel=0.01)
    first, *others = weight.grad.double().to_dense()
    expected = 10.0 if norm is None else 20.0 / D**0.5
    assert first.tolist() == pytest.approx([expected] * D, rel=0.01)
    assert not torch.stack(others).any()


class TestTorchsOwn:
    """torch's own functions, which Lightning calls, clip the sparse gradients of a head."""

    @staticmethod
    def gradients():
        torch.manual_seed(0)
        head = ClassHead(D, C, sampler=Systematic(torch.ones(C), 8), sparse=True)
        hidden = torch.nn.Linear(D, D)(torch.randn(6, D))
        head(hidden, torch.tensor([1, 1, 1, 4, 5, 5])).backward()
        dense = copy.deepcopy(head)
        for mine, other in zip(head.parameters(), dense.parameters(), strict=True):
            assert mine.grad.is_sparse
            assert not mine.grad.is_coalesced()
            other.grad = mine.grad.to_dense()
        return head, dense

    @staticmethod
    def assert_equal(head, dense):
        for mine, other in zip(head.parameters(), dense.parameters(), strict=True):
            assert mine.grad.is_sparse
            torch.testing.assert_close(mine.grad.to_dense(), other.grad)

    @pytest.mark.parametrize("foreach", [None, True, False])
    @pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
    def test_norm(self, norm_type, foreach):
        head, dense = self.gradients()
        norms = [
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)
            for model in (head, dense)
        ]
        torch.testing.assert_close(*norms)
        assert norms[0] > 0.1
        self.assert_equal(head, dense)

    @pytest.mark.parametrize("foreach", [None, True, False])
    def test_value(self, foreach):
        head, dense = self.gradients()
        for model in (head, dense):
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
        self.assert_equal(head, dense)
        assert dense.weight.grad.abs().max() == 0.05

    def test_a_gradient_without_rows_has_norm_0(self):
        weight, _ = params = parameters()
        set_gradients(params, torch.tensor([], dtype=torch.int64), 0)
        assert torch.nn.utils.clip_grad_norm_(weight, 1.0, math.inf) == 0

    def test_a_range_without_0_is_refused(self):
        head, _ = self.gradients()
        with pytest.raises(NotImplementedError, match="range that holds 0, got min 1"):
            head.weight.grad.clamp_(min=1)
