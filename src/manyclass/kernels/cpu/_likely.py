"""ctypes bindings of likely.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.kernels.cpu._operands import address
from manyclass.kernels.cpu.build import bind

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@functools.cache
def _likely(dtype: torch.dtype) -> Callable[..., None]:
    sizes = (c_int64, c_int64, c_int64)
    return bind(f"manyclass_likely_{_SUFFIXES[dtype]}", c_void_p, c_void_p, *sizes, c_void_p, c_void_p, c_int)


def likely_(largest: Tensor, scores: Tensor, bias: Tensor | None, nearest: int) -> Tensor:
    """Raise `largest` [C] in place to the largest log p of the rows of scores [B, C]; return their nearest classes.

    Args:
        largest: float32 [C].
        scores: float32 or bfloat16 [B, C], without the bias.
        bias: float32 [C], or None.
        nearest: the number of largest scores that a row leaves out.

    Returns:
        Their classes, int64 [B, nearest]; -1 if fewer are above -inf.

    Raises:
        TypeError: an operand has another dtype.
        ValueError: an operand has another size, or is not on the CPU.
    """
    if scores.dtype not in _SUFFIXES:
        raise TypeError(f"`scores` must have dtype torch.float32 or torch.bfloat16, got {scores.dtype}")
    if scores.dim() != 2:
        raise ValueError(f"`scores` must have shape [B, C], got {list(scores.shape)}")
    batch, classes = scores.shape
    ids = torch.empty(batch, nearest, dtype=torch.int64, device=scores.device)
    _likely(scores.dtype)(
        address("scores", scores, scores.dtype, batch * classes),
        None if bias is None else address("bias", bias, torch.float32, classes),
        batch,
        classes,
        nearest,
        address("largest", largest, torch.float32, classes),
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return ids
