"""ctypes bindings of rows.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from manyclass.kernels.cpu._operands import address, refuse_id, suffix
from manyclass.kernels.cpu.build import SUFFIXES, bind

_GRADIENT = (c_int64, c_void_p, c_int64, c_void_p, c_int64)


@functools.cache
def _adagrad(dtype: torch.dtype) -> Callable[..., int]:
    name = f"manyclass_adagrad_{suffix(dtype)}"
    return bind(name, *[c_void_p] * 2, *_GRADIENT, c_double, c_double, c_int, c_int, restype=c_int64)


@functools.cache
def _adam(dtype: torch.dtype) -> Callable[..., int]:
    name = f"manyclass_adam_{suffix(dtype)}"
    return bind(name, *[c_void_p] * 4, *_GRADIENT, *[c_double] * 4, c_int, restype=c_int64)


def has_row_kernel(*tables: Tensor) -> bool:
    """Return True if a row kernel can update these tables in place: contiguous, of one dtype."""
    dtype = tables[0].dtype
    return dtype in SUFFIXES and all(table.dtype == dtype and table.is_contiguous() for table in tables)


def adagrad_(
    weight: Tensor, total: Tensor, ids: Tensor, values: Tensor, *, lr: float, eps: float, by_row: bool
) -> None:
    """Do one step of RowAdagrad on the rows ids [1, N] of weight [C, ...] with gradients [N, ...]; ids may repeat.

    Raises:
        TypeError: an operand has another dtype.
        ValueError: an operand has another size, or an id is outside [0, C). Nothing is updated.
    """
    dtype, size, classes, number = weight.dtype, weight.numel(), weight.shape[0], ids.numel()
    dim = size // max(classes, 1)
    outside = _adagrad(dtype)(
        address("weight", weight, dtype, size),
        address("total", total, dtype, classes if by_row else size),
        classes,
        address("ids", ids, torch.int64, number),
        number,
        address("values", values, dtype, number * dim),
        dim,
        lr,
        eps,
        by_row,
        torch.get_num_threads(),
    )
    if outside >= 0:
        refuse_id("ids", ids, outside, classes)
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
    """Do one step of RowAdam on the rows ids [1, N] of weight [C, ...] with gradients [N, ...]; ids may repeat.

    Raises:
        TypeError: an operand has another dtype.
        ValueError: an operand has another size, or an id is outside [0, C). Nothing is updated.
    """
    dtype, size, classes, number = weight.dtype, weight.numel(), weight.shape[0], ids.numel()
    dim = size // max(classes, 1)
    outside = _adam(dtype)(
        address("weight", weight, dtype, size),
        address("first", first, dtype, size),
        address("second", second, dtype, size),
        address("steps", steps, torch.float32, classes),
        classes,
        address("ids", ids, torch.int64, number),
        number,
        address("values", values, dtype, number * dim),
        dim,
        lr,
        *betas,
        eps,
        torch.get_num_threads(),
    )
    if outside >= 0:
        refuse_id("ids", ids, outside, classes)
    # Torch does not see a write through a pointer, and must refuse a backward pass that needs the old values.
    increment_version(weight)
