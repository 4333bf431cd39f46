"""Checks of what a kernel gets: it reads and writes memory by address, so a wrong size would corrupt the process."""

import torch
from torch import Tensor

from manyclass import _check
from manyclass.kernels.cpu.build import SUFFIXES


def address(name: str, value: Tensor, dtype: torch.dtype, size: int) -> int:
    """Return the address of a tensor with this number of elements.

    Raises:
        TypeError: the tensor has another dtype.
        ValueError: it has another number of elements, or is not contiguous CPU memory.
    """
    # A comparison of shapes would take longer than all of this.
    if value.dtype is dtype and value.numel() == size and value.is_contiguous() and value.is_cpu:
        return value.data_ptr()
    if value.dtype is not dtype:
        raise TypeError(f"`{name}` must have dtype {dtype}, got {value.dtype}")
    if value.numel() != size:
        raise ValueError(f"`{name}` must have {size} elements, got shape {list(value.shape)}")
    _check.device(name, value, torch.device("cpu"))
    raise ValueError(f"`{name}` must be contiguous, got strides {list(value.stride())}")


def suffix(dtype: torch.dtype) -> str:
    """Return the ending of the names of the C functions for a dtype.

    Raises:
        TypeError: there are none.
    """
    if dtype not in SUFFIXES:
        raise TypeError(f"`dtype` must be one of {', '.join(map(str, SUFFIXES))}, got {dtype}")
    return SUFFIXES[dtype]


def refuse_id(name: str, ids: Tensor, position: int, num_classes: int) -> None:
    """Raise ValueError for the id at a position, which is outside [0, num_classes)."""
    got = int(ids.reshape(-1)[position])
    raise ValueError(f"`{name}` must lie in [0, {num_classes}), got {got} at position {position}")
