"""ctypes bindings of explicit.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.kernels.cpu._operands import address
from manyclass.kernels.cpu.build import bind


@functools.cache
def _put_in_front() -> Callable[..., None]:
    drawn = (c_void_p, c_void_p, c_int64)
    return bind("manyclass_put_in_front", c_void_p, c_int64, *drawn, c_void_p, c_void_p)


def put_in_front(target: Tensor, ids: Tensor, log_kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and log κ [1, B + K]: the distinct targets [B], explicit, then the draw [1, K] without them.

    Raises:
        TypeError: an operand has another dtype than int64, or float64 for log κ.
        ValueError: an operand has another size, or is not on the CPU.
    """
    target, ids, log_kappa = target.contiguous(), ids.contiguous(), log_kappa.contiguous()
    batch, k = target.numel(), ids.numel()
    out_ids = ids.new_empty(1, batch + k)
    out_log_kappa = log_kappa.new_empty(1, batch + k)
    _put_in_front()(
        address("target", target, torch.int64, batch),
        batch,
        address("ids", ids, torch.int64, k),
        address("log_kappa", log_kappa, torch.float64, k),
        k,
        out_ids.data_ptr(),
        out_log_kappa.data_ptr(),
    )
    return out_ids, out_log_kappa
