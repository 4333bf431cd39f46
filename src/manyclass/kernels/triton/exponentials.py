"""The work between the matrix products of the exact loss: one kernel over the scores of a run of classes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048  # of a row at a time
WARPS = 8


def exponentials_(
    scores: Tensor,
    start: int,
    *,
    bias: Tensor | None,
    target: Tensor,
    shift: Tensor,
    log_sum: Tensor | None = None,
    target_score: Tensor | None = None,
) -> None:
    """Turn inner products [B, n] with the classes from `start` on into exp(s - shift) in place.

    Args:
        scores: the products [B, n], float32 or float64; s adds the bias.
        start: the first class.
        bias: [n], or None.
        target: int64 [B].
        shift: [B]; out: the largest score of each example, or 0 if all are -inf, unless `log_sum` is None: then it is
            given.
        log_sum: out [B], log Σ exp s.
        target_score: out [B], written where the target is one of these classes; given if `log_sum` is.
    """
    batch, n = scores.shape
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(scores):
        _exponentials[(batch,)](
            scores,
            bias,
            target,
            shift,
            log_sum,
            target_score,
            start,
            n,
            HAS_BIAS=bias is not None,
            SUMS=log_sum is not None,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _exponentials(  # type: ignore[no-untyped-def]
    scores,
    bias,
    target,
    shift,
    log_sum,
    target_score,
    start,
    n,
    HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    """Compute one row. Every lane sums its own columns, so that lanes meet once, at the end."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * n
    lane = tl.arange(0, COLUMNS)
    if SUMS:
        # The target's score is read before it is overwritten.
        own = tl.load(target + row) - start
        inside = (own >= 0) & (own < n)
        own_score = tl.load(scores + own, mask=inside, other=0.0)
        if HAS_BIAS:
            own_score += tl.load(bias + own, mask=inside, other=0.0)
        tl.store(target_score + row, own_score, mask=inside)
        largest = tl.full([COLUMNS], float("-inf"), scores.dtype.element_ty)
        total = tl.zeros([COLUMNS], scores.dtype.element_ty)
        for first in range(0, n, COLUMNS):
            column = first + lane
            s = tl.load(scores + column, mask=column < n, other=float("-inf"))
            if HAS_BIAS:
                s += tl.load(bias + column, mask=column < n, other=0.0)
            new = tl.maximum(largest, s)
            # A lane that has seen nothing above -inf must not subtract -inf from itself.
            base = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(largest - base) + tl.exp(s - base)
            largest = new
        most = tl.max(largest, 0)
        most = tl.where(most == float("-inf"), 0.0, most)
        total_of_row = tl.sum(total * tl.exp(largest - most), 0)
        tl.store(shift + row, most)
        tl.store(log_sum + row, most + tl.log(total_of_row))
    else:
        most = tl.load(shift + row)
    for first in range(0, n, COLUMNS):
        column = first + lane
        s = tl.load(scores + column, mask=column < n, other=float("-inf"))
        if HAS_BIAS:
            s += tl.load(bias + column, mask=column < n, other=0.0)
        tl.store(scores + column, tl.exp(s - most), mask=column < n)
