"""Python's side of locate.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.native._build import function


@functools.cache
def _locate() -> Callable[..., None]:
    table = (c_void_p, c_int64, c_void_p, c_void_p, c_double, c_int64, c_void_p, c_void_p, c_int)
    return function("manyclass_locate", *table, c_void_p, c_int64, c_void_p, c_void_p, c_int)


def locate(
    position: Tensor,
    *,
    cumulative: Tensor,
    intercept: Tensor,
    slope: Tensor,
    scale: float,
    widest: int,
    guide: Tensor,
    ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Ids and masses of the classes that own the positions float64 [N]; the table is MassTable's."""
    position = position.contiguous()
    out_ids = torch.empty(position.shape, dtype=torch.int64)
    out_mass = torch.empty_like(position)
    _locate()(
        cumulative.data_ptr(),
        cumulative.shape[0] - 1,
        intercept.data_ptr(),
        slope.data_ptr(),
        scale,
        widest,
        guide.data_ptr(),
        None if ids is None else ids.data_ptr(),
        guide.element_size(),
        position.data_ptr(),
        position.numel(),
        out_ids.data_ptr(),
        out_mass.data_ptr(),
        torch.get_num_threads(),
    )
    return out_ids, out_mass
