"""ctypes bindings of exact.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.kernels.cpu._operands import address, suffix
from manyclass.kernels.cpu.build import bind


@functools.cache
def _exponentials(dtype: torch.dtype) -> Callable[..., None]:
    name = f"manyclass_exponentials_{suffix(dtype)}"
    return bind(name, c_void_p, *[c_int64] * 3, *[c_void_p] * 3, c_int64, *[c_void_p] * 3, c_int)


def exponentials_(
    scores: Tensor,
    start: int,
    *,
    bias: Tensor | None,
    target: Tensor,
    exclude: Tensor | None,
    shift: Tensor,
    log_sum: Tensor | None = None,
    target_score: Tensor | None = None,
) -> None:
    """Turn inner products [B, n] with the classes from `start` on into exp(s - shift) in place.

    Args:
        scores: the products [B, n]; s adds the bias, and is -inf for a class that the example excludes.
        start: the first class.
        bias: [n], or None.
        target: int64 [B].
        exclude: int64 [B, E], or None.
        shift: [B]; out: the largest score of each example, unless `log_sum` is None: then it is given.
        log_sum: out [B], log Σ exp s.
        target_score: out [B], written where the target is one of these classes; given if `log_sum` is.

    Raises:
        TypeError: an operand has another dtype.
        ValueError: an operand has another size, or only one of `log_sum` and `target_score` is given.
    """
    dtype, (batch, n) = scores.dtype, scores.shape
    if (log_sum is None) != (target_score is None):
        raise ValueError("`log_sum` and `target_score` must be given together, got one of them")
    num_excluded = 0 if exclude is None else exclude.shape[-1]
    _exponentials(dtype)(
        address("scores", scores, dtype, batch * n),
        batch,
        n,
        start,
        None if bias is None else address("bias", bias, dtype, n),
        address("target", target, torch.int64, batch),
        None if exclude is None else address("exclude", exclude, torch.int64, batch * num_excluded),
        num_excluded,
        address("shift", shift, dtype, batch),
        None if log_sum is None else address("log_sum", log_sum, dtype, batch),
        None if target_score is None else address("target_score", target_score, dtype, batch),
        torch.get_num_threads(),
    )
