"""ctypes bindings of locate.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass.kernels.cpu.build import bind

_TABLE = (c_void_p, c_int64, c_void_p, c_void_p, c_double, c_int64, c_void_p, c_void_p, c_int)


@dataclass(frozen=True)
class SearchTable:
    """Tensors that MassTable searches; floats may be given as their bits."""

    cumulative: Tensor
    intercept: Tensor
    slope: Tensor
    scale: float
    widest: int
    guide: Tensor
    ids: Tensor | None

    def arguments(self) -> tuple[object, ...]:
        """Return the arguments of the C functions that search this table."""
        return (
            self.cumulative.data_ptr(),
            self.cumulative.shape[0] - 1,
            self.intercept.data_ptr(),
            self.slope.data_ptr(),
            self.scale,
            self.widest,
            self.guide.data_ptr(),
            None if self.ids is None else self.ids.data_ptr(),
            self.guide.element_size(),
        )


@functools.cache
def _locate() -> Callable[..., None]:
    return bind("manyclass_locate", *_TABLE, c_void_p, c_int64, c_void_p, c_void_p, c_int)


@functools.cache
def _comb() -> Callable[..., None]:
    comb = (c_void_p, c_double, c_int64)
    return bind("manyclass_comb", *_TABLE, *comb, c_void_p, c_int64, c_void_p, c_void_p, c_int)


def locate(table: SearchTable, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and masses of the classes that own the positions, float64 of any shape."""
    position = position.contiguous()
    ids = position.new_empty(position.shape, dtype=torch.int64)
    mass = torch.empty_like(position)
    _locate()(
        *table.arguments(),
        position.data_ptr(),
        position.numel(),
        ids.data_ptr(),
        mass.data_ptr(),
        torch.get_num_threads(),
    )
    return ids, mass


def comb(table: SearchTable, offset: Tensor, spacing: float, teeth: int, certain: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and log κ [1, n + teeth]: the certain classes [n], then those under a comb at offset [1, 1]."""
    slots = certain.shape[0] + teeth
    ids = certain.new_empty(1, slots)
    log_kappa = offset.new_empty(1, slots)
    _comb()(
        *table.arguments(),
        offset.data_ptr(),
        spacing,
        teeth,
        certain.data_ptr(),
        certain.shape[0],
        ids.data_ptr(),
        log_kappa.data_ptr(),
        torch.get_num_threads(),
    )
    return ids, log_kappa
