"""Python's side of closed_form.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.native._build import SUFFIXES, function


@functools.cache
def _softmax(dtype: torch.dtype) -> Callable[..., None]:
    scores = (c_void_p, c_int64, c_int64)
    target = (c_void_p, c_void_p, c_int64)
    slots = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64)
    name = f"manyclass_softmax_{SUFFIXES[dtype]}"
    return function(name, *scores, *target, *slots, c_int, c_int, c_void_p, c_void_p, c_int)


@functools.cache
def _pull_back(dtype: torch.dtype) -> Callable[..., None]:
    gradient = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    name = f"manyclass_pull_back_{SUFFIXES[dtype]}"
    return function(name, *gradient, c_void_p, c_void_p, c_int64, *[c_void_p] * 4, c_int)


def softmax_(
    scores: Tensor,
    *,
    hidden: Tensor,
    target_rows: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor,
    log_kappa: Tensor,
    excluded: Tensor,
    sums_target: bool,
    weighs: bool,
) -> tuple[Tensor, Tensor]:
    """Turn inner products [B, K] into their gradient ∂loss/∂s in place; give losses [B] and ∂loss/∂s(target) [B].

    Everything is contiguous, of one floating dtype but log_kappa (float64); ids [K], excluded [B, E].
    """
    batch, k = scores.shape
    loss, target_gradient = scores.new_empty(batch), scores.new_empty(batch)
    _softmax(scores.dtype)(
        scores.data_ptr(),
        batch,
        k,
        hidden.data_ptr(),
        target_rows.data_ptr(),
        hidden.shape[1],
        None if bias is None else bias.data_ptr(),
        target.data_ptr(),
        ids.data_ptr(),
        log_kappa.data_ptr(),
        excluded.data_ptr(),
        excluded.shape[1],
        sums_target,
        weighs,
        loss.data_ptr(),
        target_gradient.data_ptr(),
        torch.get_num_threads(),
    )
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
