"""ctypes bindings of rows.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from manyclass.kernels.cpu.build import SUFFIXES, bind


@functools.cache
def _adagrad(dtype: torch.dtype) -> Callable[..., None]:
    gradient = (c_void_p, c_int64, c_void_p, c_int64)
    name = f"manyclass_adagrad_{SUFFIXES[dtype]}"
    return bind(name, c_void_p, c_void_p, *gradient, c_double, c_double, c_int, c_int)


@functools.cache
def _adam(dtype: torch.dtype) -> Callable[..., None]:
    gradient = (c_void_p, c_int64, c_void_p, c_int64)
    name = f"manyclass_adam_{SUFFIXES[dtype]}"
    return bind(name, *[c_void_p] * 4, *gradient, *[c_double] * 4, c_int)


def has_row_kernel(*tables: Tensor) -> bool:
    """Return True if a row kernel can update these tables in place: contiguous, of one dtype."""
    dtype = tables[0].dtype
    return dtype in SUFFIXES and all(table.dtype == dtype and table.is_contiguous() for table in tables)


def adagrad_(
    weight: Tensor, total: Tensor, ids: Tensor, values: Tensor, *, lr: float, eps: float, by_row: bool
) -> None:
    """Do one step of RowAdagrad on the rows ids [1, N] of weight [C, ...] with gradients [N, ...]; ids may repeat."""
    number = ids.numel()
    _adagrad(weight.dtype)(
        weight.data_ptr(),
        total.data_ptr(),
        ids.data_ptr(),
        number,
        values.data_ptr(),
        values.numel() // max(number, 1),
        lr,
        eps,
        by_row,
        torch.get_num_threads(),
    )
    # Torch does not see a write through a pointer, and must refuse a backward pass that needs the old values.
    increment_version(weight)


def adam_(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    ids: Tensor,
    values: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Do one step of RowAdam on the rows ids [1, N] of weight [C, ...] with gradients [N, ...]; ids may repeat."""
    number = ids.numel()
    _adam(weight.dtype)(
        weight.data_ptr(),
        first.data_ptr(),
        second.data_ptr(),
        steps.data_ptr(),
        ids.data_ptr(),
        number,
        values.data_ptr(),
        values.numel() // max(number, 1),
        lr,
        *betas,
        eps,
        torch.get_num_threads(),
    )
    # Torch does not see a write through a pointer, and must refuse a backward pass that needs the old values.
    increment_version(weight)
