"""ctypes bindings of closed_form.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.forms import LogSumExp, PairSum
from manyclass.kernels.cpu.build import SUFFIXES, bind
from manyclass.kernels.draw import GatheredDraw, PullBack

_DRAW = (c_int64, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 5, c_int64)


@functools.cache
def _log_sum_exp(dtype: torch.dtype) -> Callable[..., None]:
    name = f"manyclass_log_sum_exp_{SUFFIXES[dtype]}"
    return bind(name, c_void_p, *_DRAW, c_int, c_int, c_void_p, c_void_p, c_int)


@functools.cache
def _pair_sum(dtype: torch.dtype) -> Callable[..., None]:
    name = f"manyclass_pair_sum_{SUFFIXES[dtype]}"
    return bind(name, c_void_p, *_DRAW, c_double, *[c_int] * 4, c_void_p, c_void_p, c_int)


@functools.cache
def _pull_back(dtype: torch.dtype) -> Callable[..., None]:
    gradient = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    name = f"manyclass_pull_back_{SUFFIXES[dtype]}"
    return bind(name, *gradient, c_void_p, c_void_p, c_int64, *[c_void_p] * 4, c_int)


def log_sum_exp_(form: LogSumExp, scores: Tensor, draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Turn inner products [B, K] into ∂loss/∂s in place; return losses [B] and ∂loss/∂s(target) [B]."""
    return _call(_log_sum_exp(scores.dtype), scores, draw, form.target, form.kappa)


def pair_sum_(form: PairSum, scores: Tensor, draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Do the same as `log_sum_exp_` for a pair sum."""
    margin, hinge = form.margin_of(draw.num_classes), form.activation == "relu"
    return _call(_pair_sum(scores.dtype), scores, draw, margin, form.paired, form.positive, form.mean, hinge)


def _call(kernel: Callable[..., None], scores: Tensor, draw: GatheredDraw, *options: float) -> tuple[Tensor, Tensor]:
    loss, target_gradient = scores.new_empty(scores.shape[0]), scores.new_empty(scores.shape[0])
    kernel(
        scores.data_ptr(),
        draw.hidden.shape[0],
        draw.ids.shape[0],
        draw.hidden.data_ptr(),
        draw.rows.data_ptr(),
        draw.hidden.shape[1],
        None if draw.bias is None else draw.bias.data_ptr(),
        draw.target.data_ptr(),
        draw.ids.data_ptr(),
        draw.log_kappa.data_ptr(),
        draw.excluded.data_ptr(),
        draw.excluded.shape[1],
        *options,
        loss.data_ptr(),
        target_gradient.data_ptr(),
        torch.get_num_threads(),
    )
    return loss, target_gradient


def pull_back_(operands: PullBack) -> None:
    """Finish the gradients around the products of the backward pass; see `PullBack`."""
    batch, k = operands.score_gradient.shape
    outputs = (operands.grad_hidden, operands.scaled_hidden, operands.row_values, operands.bias_values)
    _pull_back(operands.score_gradient.dtype)(
        operands.score_gradient.data_ptr(),
        batch,
        k,
        operands.target_gradient.data_ptr(),
        operands.grad.data_ptr(),
        operands.hidden.data_ptr(),
        operands.rows.data_ptr(),
        operands.hidden.shape[1],
        *(None if output is None else output.data_ptr() for output in outputs),
        torch.get_num_threads(),
    )
