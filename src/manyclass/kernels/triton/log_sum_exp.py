"""The log-sum-exp form over the slots of a draw: losses, and the gradient of the scores in their place."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.forms import LogSumExp
from manyclass.kernels.triton.slots import Layout, slot_scores

ROWS, COLUMNS = 4, 1024  # of a tile
WARPS = 8


def log_sum_exp_(
    form: LogSumExp, scores: Tensor, offset: Tensor, target_score: Tensor, ids: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """Turn inner products [rows, columns] into ∂loss/∂s in place; return losses [B] and ∂loss/∂s(target) [B].

    Args:
        form: the loss, without a transform of the target's score.
        scores: contiguous; out: ∂loss/∂s times `scale`, 0 in the rows that pad the last group.
        offset: float32 or float64 [Σ G·K], what is added to the scores of the slots; -inf: empty.
        target_score: [B], of the dtype of `offset`.
        ids: int64 [Σ G·K], the classes of the slots.
        layout: the slots.
        scale: a factor of the gradient, which keeps small probabilities in float16.
    """
    loss, target_gradient = torch.empty_like(target_score), torch.empty_like(target_score)
    with torch.cuda.device_of(scores):
        _log_sum_exp[(triton.cdiv(layout.rows, ROWS),)](
            scores=scores,
            offset=offset,
            ids=ids,
            target_score=target_score,
            loss=loss,
            target_gradient=target_gradient,
            scale=scale,
            **layout.arguments(offset.dtype),
            TARGET=form.target,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return loss, target_gradient


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_exp(  # type: ignore[no-untyped-def]
    scores,
    offset,
    ids,
    excluded,
    mask,
    order,
    target_score,
    loss,
    target_gradient,
    batch,
    rows,
    columns,
    num_excluded,
    scale,
    k0,
    size0,
    place0,
    k1,
    size1,
    place1,
    k2,
    size2,
    place2,
    PARTS: tl.constexpr,
    INCLUDED: tl.constexpr,
    TARGET: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < batch
    example = row
    if HAS_ORDER:
        example = tl.load(order + row, mask=present, other=0)
    t = tl.load(target_score + example, mask=present, other=0.0)
    most = tl.full([ROWS], float("-inf"), WIDE)
    z = tl.zeros([ROWS], WIDE)
    if TARGET:
        most, z = t, tl.full([ROWS], 1.0, WIDE)
    # Twice over all slots: the first time sums up Z̃, the second writes κ u/Z̃.
    for turn in tl.static_range(2):
        if turn == 1:
            # An empty draw has no Z̃: its loss and gradient are 0.
            has_z = (z > 0) | (z != z)
            share = tl.where(has_z, 1.0 / tl.where(has_z, z, 1.0), 0.0)
            own = tl.zeros([ROWS], WIDE)
            if TARGET:
                own = tl.exp(t - most)
            value = tl.where(has_z, most + tl.log(tl.where(has_z, z, 1.0)) - t, 0.0)
            tl.store(loss + example, value, mask=present)
            tl.store(target_gradient + example, tl.where(has_z, own * share - 1.0, 0.0), mask=present)
        first = 0
        for part in tl.static_range(PARTS):
            k, size, place = k0, size0, place0
            if part == 1:
                k, size, place = k1, size1, place1
            if part == 2:
                k, size, place = k2, size2, place2
            for start in range(0, k, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                s = slot_scores(
                    scores,
                    offset,
                    ids,
                    excluded,
                    mask,
                    row,
                    example,
                    present,
                    column,
                    first,
                    k,
                    size,
                    place,
                    columns,
                    num_excluded,
                    not (INCLUDED and part == PARTS - 1),
                    HAS_MASK,
                    WIDE,
                )
                if turn == 0:
                    new = tl.maximum(most, tl.max(s, 1))
                    base = tl.where(new == float("-inf"), 0.0, new)
                    z = z * tl.exp(most - base) + tl.sum(tl.exp(s - base[:, None]), 1)
                    most = new
                else:
                    base = tl.where(most == float("-inf"), 0.0, most)
                    u = tl.exp(s - base[:, None]) * (share * scale)[:, None]
                    at = row[:, None] * columns + first + column[None, :]
                    tl.store(scores + at, u, mask=(row < rows)[:, None] & (column < k)[None, :])
            first += k
