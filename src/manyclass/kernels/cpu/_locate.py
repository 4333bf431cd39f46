"""ctypes bindings of locate.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass import _check
from manyclass.kernels.cpu._operands import address
from manyclass.kernels.cpu.build import bind

_TABLE = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_double, c_int64, c_void_p, c_int64, c_void_p, c_int)
_FLOATS = (torch.float64,)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class SearchTable:
    """Tensors that MassTable searches.

    Args:
        cumulative: [n + 1], the cumulative sum of n masses.
        intercept, slope: [S], of the cells of each stretch.
        scale: stretches per unit of mass.
        widest: the largest number of classes that begin in one cell, below n.
        guide: int32 or int64, the class at which the search in each cell begins.
        ids: [n] with the dtype of `guide`, the class of each rank; None: they are equal.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another size or is not contiguous CPU memory, or `widest` is not below n.
    """

    cumulative: Tensor
    intercept: Tensor
    slope: Tensor
    scale: float
    widest: int
    guide: Tensor
    ids: Tensor | None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("cumulative", _FLOATS),
            ("intercept", _FLOATS),
            ("slope", _FLOATS),
            ("guide", _INTEGERS),
        ):
            tensor = getattr(self, name)
            if tensor.dtype not in allowed:
                raise TypeError(f"`{name}` must have dtype {' or '.join(map(str, allowed))}, got {tensor.dtype}")
        classes = self.cumulative.numel() - 1
        _check.integer("number of classes", classes, 0)
        address("cumulative", self.cumulative, self.cumulative.dtype, classes + 1)
        if classes == 0:
            # Nothing is searched, and the other tensors are not read.
            return
        _check.integer("widest", self.widest, 0, classes - 1)
        _check.integer("number of stretches", self.slope.numel(), 1)
        _check.integer("number of cells", self.guide.numel(), 1)
        address("slope", self.slope, self.slope.dtype, self.slope.numel())
        address("intercept", self.intercept, self.intercept.dtype, self.slope.numel())
        address("guide", self.guide, self.guide.dtype, self.guide.numel())
        if self.ids is not None:
            address("ids", self.ids, self.guide.dtype, classes)

    def arguments(self, searches: int) -> tuple[object, ...]:
        """Return the arguments of the C functions that search this table.

        Raises:
            ValueError: something is to be searched in a table without classes.
        """
        cumulative, guide = self.cumulative, self.guide
        classes = cumulative.shape[0] - 1
        if classes == 0 and searches:
            raise ValueError(f"`position` must be empty for a table without classes, got {searches} positions")
        # The addresses are read each time: torch may move the memory of a tensor, as `share_memory_` does.
        return (
            cumulative.data_ptr(),
            classes,
            self.intercept.data_ptr(),
            self.slope.data_ptr(),
            self.slope.shape[0],
            self.scale,
            self.widest,
            guide.data_ptr(),
            guide.shape[0],
            None if self.ids is None else self.ids.data_ptr(),
            guide.element_size(),
        )


@functools.cache
def _locate() -> Callable[..., None]:
    return bind("manyclass_locate", *_TABLE, c_void_p, c_int64, c_void_p, c_void_p, c_int)


@functools.cache
def _comb() -> Callable[..., None]:
    comb = (c_void_p, c_double, c_int64)
    return bind("manyclass_comb", *_TABLE, *comb, c_void_p, c_int64, c_void_p, c_void_p, c_int)


def locate(table: SearchTable, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and masses of the classes that own the positions, float64 of any shape.

    Positions before or behind the line, and NaN, belong to its first or last class.

    Raises:
        TypeError: the positions are not float64.
        ValueError: there are positions but no classes.
    """
    position = position.contiguous()
    ids = position.new_empty(position.shape, dtype=torch.int64)
    mass = torch.empty_like(position)
    _locate()(
        *table.arguments(position.numel()),
        address("position", position, torch.float64, position.numel()),
        position.numel(),
        ids.data_ptr(),
        mass.data_ptr(),
        torch.get_num_threads(),
    )
    return ids, mass


def comb(table: SearchTable, offset: Tensor, spacing: float, teeth: int, certain: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and log κ [1, n + teeth]: the certain classes [n], then those under a comb at offset [1, 1].

    Raises:
        TypeError: offset is not float64, or the certain classes are not int64.
        ValueError: the number of teeth is negative, or above 0 for a table without classes; a tensor has another
            size.
    """
    if teeth < 0:
        raise ValueError(f"`teeth` must be at least 0, got {teeth}")
    slots = certain.numel() + teeth
    # Not torch.empty: with a default device of another kind the kernel would write to memory that is not there.
    ids, log_kappa = certain.new_empty(1, slots), offset.new_empty(1, slots)
    _comb()(
        *table.arguments(teeth),
        address("offset", offset, torch.float64, 1),
        spacing,
        teeth,
        address("certain", certain, torch.int64, slots - teeth),
        slots - teeth,
        ids.data_ptr(),
        log_kappa.data_ptr(),
        torch.get_num_threads(),
    )
    return ids, log_kappa
