"""The pair-sum form over the slots of a draw: losses, and the gradient of the scores in their place."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.forms import PairSum
from manyclass.kernels.triton.sizes import cdiv
from manyclass.kernels.triton.slots import Layout, Operands, slot_scores, target_scores


def pair_sum_(form: PairSum, scores: Tensor, operands: Operands, layout: Layout, scale: float) -> tuple[Tensor, Tensor]:
    """Do the same as `log_sum_exp_` for a pair sum.

    The offset of the slots holds the margin, and that of the targets log κ of the target if the form adds it.
    """
    arguments = {**operands.arguments(), **layout.arguments(operands.offset.dtype)}
    loss, target_gradient = (operands.offset.new_empty(layout.batch) for _ in range(2))
    with torch.cuda.device_of(scores):
        _pair_sum[(cdiv(layout.rows, arguments["ROWS"]),)](
            scores=scores,
            loss=loss,
            target_gradient=target_gradient,
            scale=scale,
            HINGE=form.activation == "relu",
            PAIRED=form.paired,
            POSITIVE=form.positive,
            MEAN=form.mean,
            NEEDS_CANDIDATES=form.needs_candidates,
            **arguments,
        )
    return loss, target_gradient


@triton.jit  # type: ignore[untyped-decorator]
def _softplus(x) -> Any:  # type: ignore[no-untyped-def]
    """Return log(1 + exp x), without overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid(x) -> Any:  # type: ignore[no-untyped-def]
    """Return 1 / (1 + exp -x), without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit  # type: ignore[untyped-decorator]
def _pair_sum(  # type: ignore[no-untyped-def]
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
    HINGE: tl.constexpr,
    PAIRED: tl.constexpr,
    POSITIVE: tl.constexpr,
    MEAN: tl.constexpr,
    NEEDS_CANDIDATES: tl.constexpr,
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
    counted = present
    if HAS_VALID:
        counted = tl.load(valid + example, mask=present, other=0) != 0
    total = tl.zeros([ROWS], WIDE)
    slope = tl.zeros([ROWS], WIDE)
    number = tl.zeros([ROWS], WIDE)
    shift = tl.zeros([ROWS], WIDE)
    if PAIRED:
        shift -= t
    # Twice over all slots: the first time sums up φ, φ' and the number of slots, the second writes φ'.
    for turn in tl.static_range(2):
        if turn == 1:
            share = tl.full([ROWS], 1.0, WIDE)
            if MEAN:
                share = 1.0 / tl.maximum(number, 1.0)
            value = total * share
            own = tl.zeros([ROWS], WIDE)
            if PAIRED:
                own -= slope * share
            if POSITIVE:
                counts = tl.full([ROWS], 1.0, WIDE)
                if NEEDS_CANDIDATES:
                    counts = tl.where(number > 0, 1.0, 0.0)
                value += counts * _softplus(-t)
                own -= counts * _sigmoid(-t)
            # The loss and the gradient of an ignored example are 0.
            tl.store(loss + example, tl.where(counted, value, 0.0), mask=present)
            tl.store(target_gradient + example, tl.where(counted, own, 0.0), mask=present)
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
                # φ and φ' of an empty slot are 0; a NaN is none.
                filled = s != float("-inf")
                x = tl.where(filled, s, 0.0) + shift[:, None]
                if HINGE:
                    gradient = tl.where(x > 0, 1.0, 0.0).to(WIDE)
                else:
                    gradient = _sigmoid(x)
                gradient = tl.where(filled, gradient, 0.0)
                if turn == 0:
                    if HINGE:
                        phi = tl.where(x <= 0, 0.0, x)
                    else:
                        phi = _softplus(x)
                    total += tl.sum(tl.where(filled, phi, 0.0), 1)
                    slope += tl.sum(gradient, 1)
                    number += tl.sum(tl.where(filled, 1.0, 0.0).to(WIDE), 1)
                else:
                    at = row[:, None] * columns + first + column[None, :]
                    gradient = tl.where(counted[:, None], gradient * (share * scale)[:, None], 0.0)
                    tl.store(scores + at, gradient, mask=(row < rows)[:, None] & (column < k)[None, :])
            first += k
