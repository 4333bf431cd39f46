"""ctypes bindings of closed_form.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.forms import LogSumExp, PairSum
from manyclass.kernels.cpu._operands import address, refuse_id, suffix
from manyclass.kernels.cpu.build import bind
from manyclass.kernels.draw import GatheredDraw, PullBack

_DRAW = (c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4, c_int64)
_MAX_SLOTS = (1 << 31) - 1  # slots are numbered in int32


@functools.cache
def _log_sum_exp(dtype: torch.dtype) -> Callable[..., int]:
    name = f"manyclass_log_sum_exp_{suffix(dtype)}"
    return bind(name, c_void_p, *_DRAW, c_int, c_int, c_void_p, c_void_p, c_int, restype=c_int64)


@functools.cache
def _pair_sum(dtype: torch.dtype) -> Callable[..., int]:
    name = f"manyclass_pair_sum_{suffix(dtype)}"
    return bind(name, c_void_p, *_DRAW, c_double, *[c_int] * 4, c_void_p, c_void_p, c_int, restype=c_int64)


@functools.cache
def _pull_back(dtype: torch.dtype) -> Callable[..., None]:
    gradient = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    name = f"manyclass_pull_back_{suffix(dtype)}"
    return bind(name, *gradient, c_void_p, c_void_p, c_int64, *[c_void_p] * 4, c_int)


def log_sum_exp_(form: LogSumExp, scores: Tensor, draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Turn inner products [B, K] into ∂loss/∂s in place; return losses [B] and ∂loss/∂s(target) [B].

    Raises:
        TypeError: an operand has another dtype than `GatheredDraw` says.
        ValueError: an operand has another size, or a class has no bias. The scores are unchanged.
    """
    return _call(_log_sum_exp(scores.dtype), scores, draw, form.target, form.kappa)


def pair_sum_(form: PairSum, scores: Tensor, draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Do the same as `log_sum_exp_` for a pair sum."""
    margin, hinge = form.margin_of(draw.num_classes), form.activation == "relu"
    return _call(_pair_sum(scores.dtype), scores, draw, margin, form.paired, form.positive, form.mean, hinge)


def _call(kernel: Callable[..., int], scores: Tensor, draw: GatheredDraw, *options: float) -> tuple[Tensor, Tensor]:
    dtype, bias = scores.dtype, draw.bias
    batch, dim = draw.hidden.shape
    k, num_excluded = draw.ids.shape[0], draw.excluded.shape[-1]
    if k > _MAX_SLOTS:
        raise ValueError(f"`ids` must hold at most {_MAX_SLOTS} slots, got {k}")
    classes = 0 if bias is None else bias.shape[0]
    loss, target_gradient = scores.new_empty(batch), scores.new_empty(batch)
    outside = kernel(
        address("scores", scores, dtype, batch * k),
        batch,
        k,
        address("hidden", draw.hidden, dtype, batch * dim),
        address("rows", draw.rows, dtype, (batch + k) * dim),
        dim,
        None if bias is None else address("bias", bias, dtype, classes),
        classes,
        address("target", draw.target, torch.int64, batch),
        address("ids", draw.ids, torch.int64, k),
        address("log_kappa", draw.log_kappa, torch.float64, k),
        address("excluded", draw.excluded, torch.int64, batch * num_excluded),
        num_excluded,
        *options,
        loss.data_ptr(),
        target_gradient.data_ptr(),
        torch.get_num_threads(),
    )
    if outside >= 0:
        name, ids, position = ("ids", draw.ids, outside) if outside < k else ("target", draw.target, outside - k)
        refuse_id(name, ids, position, classes)
    return loss, target_gradient


def pull_back_(operands: PullBack) -> None:
    """Finish the gradients around the products of the backward pass; see `PullBack`.

    Raises:
        TypeError: an operand has another dtype than the others.
        ValueError: an operand has another size, or only one of the two that come together is given.
    """
    dtype = operands.score_gradient.dtype
    batch, k = operands.score_gradient.shape
    dim = operands.hidden.shape[-1]
    if (operands.scaled_hidden is None) != (operands.row_values is None):
        raise ValueError("`scaled_hidden` and `row_values` must be given together, got one of them")
    grad_hidden, scaled_hidden = operands.grad_hidden, operands.scaled_hidden
    row_values, bias_values = operands.row_values, operands.bias_values
    _pull_back(dtype)(
        address("score_gradient", operands.score_gradient, dtype, batch * k),
        batch,
        k,
        address("target_gradient", operands.target_gradient, dtype, batch),
        address("grad", operands.grad, dtype, batch),
        address("hidden", operands.hidden, dtype, batch * dim),
        address("rows", operands.rows, dtype, (batch + k) * dim),
        dim,
        None if grad_hidden is None else address("grad_hidden", grad_hidden, dtype, batch * dim),
        None if scaled_hidden is None else address("scaled_hidden", scaled_hidden, dtype, batch * dim),
        None if row_values is None else address("row_values", row_values, dtype, (batch + k) * dim),
        None if bias_values is None else address("bias_values", bias_values, dtype, batch + k),
        torch.get_num_threads(),
    )
