"""The log-sum-exp form over the slots of a draw: losses, and the gradient of the scores in their place."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.forms import LogSumExp
from manyclass.kernels.triton.sizes import cdiv
from manyclass.kernels.triton.slots import Layout, Operands, slot_scores, target_scores


def log_sum_exp_(
    form: LogSumExp, scores: Tensor, operands: Operands, layout: Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """Turn inner products [rows, columns] into ∂loss/∂s in place; return losses [B] and ∂loss/∂s(target) [B].

    Args:
        form: the loss, without a transform of the target's score.
        scores: contiguous; out: ∂loss/∂s times `scale`, 0 in the rows that pad the last group.
        operands: what is added to the products, and the operands of the targets' products.
        layout: the slots.
        scale: a factor of the gradient, which keeps small probabilities in float16.
    """
    arguments = {**operands.arguments(), **layout.arguments(operands.offset.dtype)}
    loss, target_gradient = (operands.offset.new_empty(layout.batch) for _ in range(2))
    with torch.cuda.device_of(scores):
        _log_sum_exp[(cdiv(layout.rows, arguments["ROWS"]),)](
            scores=scores,
            loss=loss,
            target_gradient=target_gradient,
            scale=scale,
            TARGET=form.target,
            **arguments,
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
    hidden,
    target_rows,
    target_offset,
    valid,
    loss,
    target_gradient,
    batch,
    rows,
    columns,
    num_excluded,
    dim,
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
    HAS_OFFSET: tl.constexpr,
    HAS_VALID: tl.constexpr,
    SHARED0: tl.constexpr,
    SHARED1: tl.constexpr,
    SHARED2: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < batch
    example = row
    if HAS_ORDER:
        example = tl.load(order + row, mask=present, other=0)
    t = target_scores(hidden, target_rows, target_offset, row, example, present, dim, HAS_OFFSET, WIDE, ROWS, COLUMNS)
    most = tl.full([ROWS], float("-inf"), WIDE)
    z = tl.zeros([ROWS], WIDE)
    if TARGET:
        most, z = t, tl.full([ROWS], 1.0, WIDE)
    # Twice over all slots: the first time sums up Z̃, the second writes κ u/Z̃.
    for turn in tl.static_range(2):
        if turn == 1:
            # An empty draw has no Z̃: its loss and gradient are 0, as those of an ignored example.
            has_z = (z > 0) | (z != z)
            if HAS_VALID:
                has_z = has_z & (tl.load(valid + example, mask=present, other=0) != 0)
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
                    (SHARED0 and part == 0) or (SHARED1 and part == 1) or (SHARED2 and part == 2),
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
                    # Selected, not multiplied by 0: the scores of an ignored example may be NaN.
                    u = tl.where(has_z[:, None], tl.exp(s - base[:, None]) * (share * scale)[:, None], 0.0)
                    at = row[:, None] * columns + first + column[None, :]
                    tl.store(scores + at, u, mask=(row < rows)[:, None] & (column < k)[None, :])
            first += k
