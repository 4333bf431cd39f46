"""Targets of a batch with ignored examples: classes in their place, and the share of each in a mean, in one kernel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EXAMPLES = 4096  # that are read at once
WARPS = 16


def present_targets(target: Tensor, ignore_index: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return targets without ignored ones, a mask of the others, and the share of each in the mean over these.

    Args:
        target: int64 [B], contiguous. One program reads all of them.
        ignore_index: the target of ignored examples.
        dtype: of the shares, float32 or float64.

    Returns:
        Targets int64 [B], with the largest in place of ignored ones, or 0 if all are ignored; bool [B], False for
        ignored examples; and the shares [B], 1/n for the n examples that are not ignored and 0 for the ignored ones.
    """
    kept, valid = torch.empty_like(target), torch.empty_like(target, dtype=torch.bool)
    share = torch.empty_like(target, dtype=dtype)
    with torch.cuda.device_of(target):
        _present_targets[(1,)](
            target, kept, valid, share, len(target), ignore_index, EXAMPLES=EXAMPLES, num_warps=WARPS
        )
    return kept, valid, share


@triton.jit  # type: ignore[untyped-decorator]
def _present_targets(  # type: ignore[no-untyped-def]
    target,
    kept,
    valid,
    share,
    batch,
    ignore_index,
    EXAMPLES: tl.constexpr,
) -> Any:
    number = tl.zeros([], tl.int32)
    most = tl.zeros([], tl.int64)
    for start in range(0, batch, EXAMPLES):
        example = start + tl.arange(0, EXAMPLES)
        found = tl.load(target + example, mask=example < batch, other=ignore_index)
        counts = found != ignore_index
        number += tl.sum(counts.to(tl.int32), 0)
        most = tl.maximum(most, tl.max(tl.where(counts, found, 0), 0))
    each = 1.0 / tl.maximum(number, 1).to(share.dtype.element_ty)
    for start in range(0, batch, EXAMPLES):
        example = start + tl.arange(0, EXAMPLES)
        inside = example < batch
        found = tl.load(target + example, mask=inside, other=ignore_index)
        counts = found != ignore_index
        tl.store(kept + example, tl.where(counts, found, most), mask=inside)
        tl.store(valid + example, counts, mask=inside)
        tl.store(share + example, tl.where(counts, each, 0.0), mask=inside)
