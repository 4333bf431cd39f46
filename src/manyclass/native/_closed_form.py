"""Python's side of closed_form.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass.native._build import SUFFIXES, function

_DRAW = (c_int64, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 5, c_int64)


@dataclass(frozen=True)
class Draw:
    """A draw that the batch shares: contiguous, of one floating dtype but log_kappa (float64)."""

    hidden: Tensor
    target_rows: Tensor
    bias: Tensor | None
    target: Tensor
    ids: Tensor
    log_kappa: Tensor
    excluded: Tensor

    def arguments(self) -> tuple[object, ...]:
        return (
            self.hidden.shape[0],
            self.ids.shape[0],
            self.hidden.data_ptr(),
            self.target_rows.data_ptr(),
            self.hidden.shape[1],
            None if self.bias is None else self.bias.data_ptr(),
            self.target.data_ptr(),
            self.ids.data_ptr(),
            self.log_kappa.data_ptr(),
            self.excluded.data_ptr(),
            self.excluded.shape[1],
        )


@functools.cache
def _softmax(dtype: torch.dtype) -> Callable[..., None]:
    name = f"manyclass_softmax_{SUFFIXES[dtype]}"
    return function(name, c_void_p, *_DRAW, c_int, c_int, c_void_p, c_void_p, c_int)


@functools.cache
def _pair_sum(dtype: torch.dtype) -> Callable[..., None]:
    name = f"manyclass_pair_sum_{SUFFIXES[dtype]}"
    return function(name, c_void_p, *_DRAW, c_double, *[c_int] * 4, c_void_p, c_void_p, c_int)


@functools.cache
def _pull_back(dtype: torch.dtype) -> Callable[..., None]:
    gradient = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    name = f"manyclass_pull_back_{SUFFIXES[dtype]}"
    return function(name, *gradient, c_void_p, c_void_p, c_int64, *[c_void_p] * 4, c_int)


def softmax_(scores: Tensor, draw: Draw, *, sums_target: bool, weighs: bool) -> tuple[Tensor, Tensor]:
    """Turn inner products [B, K] into ∂loss/∂s in place; give losses [B] and ∂loss/∂s(target) [B].

    loss = -s(target) + log([sums_target] exp s(target) + Σ_j [weighs: κ_j] exp s_j)
    """
    loss, target_gradient = scores.new_empty(scores.shape[0]), scores.new_empty(scores.shape[0])
    out = (loss.data_ptr(), target_gradient.data_ptr(), torch.get_num_threads())
    _softmax(scores.dtype)(scores.data_ptr(), *draw.arguments(), sums_target, weighs, *out)
    return loss, target_gradient


def pair_sum_(
    scores: Tensor, draw: Draw, *, margin: float, paired: bool, positive: bool, mean: bool, hinge: bool
) -> tuple[Tensor, Tensor]:
    """As `softmax_`, of the loss

    [positive] softplus(-s(target)) + Σ_j φ(s_j - [paired] s(target) + margin), φ softplus or, if `hinge`, relu
    """
    loss, target_gradient = scores.new_empty(scores.shape[0]), scores.new_empty(scores.shape[0])
    out = (loss.data_ptr(), target_gradient.data_ptr(), torch.get_num_threads())
    _pair_sum(scores.dtype)(scores.data_ptr(), *draw.arguments(), margin, paired, positive, mean, hinge, *out)
    return loss, target_gradient


def pull_back_(
    gradient: Tensor,
    target_gradient: Tensor,
    grad: Tensor,
    *,
    hidden: Tensor,
    target_rows: Tensor,
    grad_hidden: Tensor | None,
    weighed: Tensor | None,
    values: Tensor | None,
    bias_values: Tensor | None,
) -> None:
    """Finish the gradients around the backward products; what is None is not wanted. See closed_form.cpp."""
    batch, k = gradient.shape
    _pull_back(gradient.dtype)(
        gradient.data_ptr(),
        batch,
        k,
        target_gradient.data_ptr(),
        grad.data_ptr(),
        hidden.data_ptr(),
        target_rows.data_ptr(),
        hidden.shape[1],
        *(None if x is None else x.data_ptr() for x in (grad_hidden, weighed, values, bias_values)),
        torch.get_num_threads(),
    )
