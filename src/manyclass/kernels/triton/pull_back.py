"""The elementwise work around the products of the backward pass: one kernel over the batch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.kernels.triton.sizes import cdiv, next_power_of_2
from manyclass.kernels.triton.slots import Layout

ELEMENTS = 1024  # of a tile
WARPS = 4


def pull_back(
    hidden: Tensor,
    target_rows: Tensor,
    grad: Tensor,
    target_gradient: Tensor,
    valid: Tensor | None,
    layout: Layout,
    *,
    product: Tensor | None,
    grad_hidden: Tensor | None,
    scaled_hidden: Tensor | None,
    grad_targets: Tensor | None,
    scale: float,
) -> None:
    """Finish the gradient of hidden, and write the factor of the slots' row gradients and the targets' row gradients.

    Args:
        hidden: [rows, D], in the order of the groups.
        target_rows: [B, D], by example.
        grad: gradient of the losses [B].
        target_gradient: ∂loss/∂s(target) [B].
        valid: bool [B], False for ignored examples, whose hidden vectors may be NaN; None: there are none.
        layout: the slots.
        product: [rows, D], scale · ∂loss/∂s times the rows of the slots; given if `grad_hidden` is.
        grad_hidden: out [B, D], by example; None: not wanted.
        scaled_hidden: out [rows, D], grad · hidden / scale, 0 in the rows of ignored examples and in those that pad the
            last group; None: not wanted.
        grad_targets: out [B, D], by example; given if `scaled_hidden` is.
        scale: the factor that ∂loss/∂s of the slots was written with.
    """
    dim = hidden.shape[1]
    columns = min(next_power_of_2(dim), ELEMENTS)
    rows = max(1, ELEMENTS // columns)
    with torch.cuda.device_of(hidden):
        _pull_back[(cdiv(layout.rows, rows),)](
            hidden,
            target_rows,
            grad,
            target_gradient,
            valid,
            layout.order,
            product,
            grad_hidden,
            scaled_hidden,
            grad_targets,
            layout.batch,
            layout.rows,
            dim,
            1.0 / scale,
            HAS_VALID=valid is not None,
            HAS_ORDER=layout.order is not None,
            WANTS_HIDDEN=grad_hidden is not None,
            WANTS_ROWS=scaled_hidden is not None,
            WIDE=tl.float64 if target_gradient.dtype == torch.float64 else tl.float32,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _pull_back(  # type: ignore[no-untyped-def]
    hidden,
    target_rows,
    grad,
    target_gradient,
    valid,
    order,
    product,
    grad_hidden,
    scaled_hidden,
    grad_targets,
    batch,
    rows,
    dim,
    inverse_scale,
    HAS_VALID: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    WANTS_HIDDEN: tl.constexpr,
    WANTS_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < batch
    example = row
    if HAS_ORDER:
        example = tl.load(order + row, mask=present, other=0)
    # Not read rather than multiplied by 0: the hidden vector of an ignored example may be NaN.
    counted = present
    if HAS_VALID:
        counted = tl.load(valid + example, mask=present, other=0) != 0
    g = tl.load(grad + example, mask=counted, other=0.0).to(WIDE)
    own = g * tl.load(target_gradient + example, mask=present, other=0.0).to(WIDE)
    for start in range(0, dim, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = present[:, None] & (column < dim)[None, :]
        at, by_example = row[:, None] * dim + column[None, :], example[:, None] * dim + column[None, :]
        if WANTS_HIDDEN:
            found = tl.load(product + at, mask=inside, other=0.0).to(WIDE) * inverse_scale
            target = tl.load(target_rows + by_example, mask=inside, other=0.0).to(WIDE)
            tl.store(grad_hidden + by_example, found * g[:, None] + target * own[:, None], mask=inside)
        if WANTS_ROWS:
            h = tl.load(hidden + at, mask=inside & counted[:, None], other=0.0).to(WIDE)
            padded = (row < rows)[:, None] & (column < dim)[None, :]
            tl.store(scaled_hidden + at, h * (g * inverse_scale)[:, None], mask=padded)
            tl.store(grad_targets + by_example, h * own[:, None], mask=inside)
