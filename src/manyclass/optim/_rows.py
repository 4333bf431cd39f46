"""Reading, writing and resizing rows of a table."""

import torch
from torch import Tensor

from manyclass.optim._rounding import round_at_random


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of arithmetic and state: small updates would vanish beside a weight in half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def take(table: Tensor, ids: Tensor | None) -> Tensor:
    """Return rows to be changed in place and written by `put`. Without ids they may be the table, not a copy."""
    rows = table if ids is None else table.index_select(0, ids)
    return rows.to(wide_dtype(rows.dtype))


def put(table: Tensor, ids: Tensor | None, rows: Tensor, *, stochastic: bool = False) -> None:
    """Write rows that `take` returned; if they are the table itself, nothing is copied.

    Args:
        table: [C, ...].
        ids: int64 [N]; None: all rows.
        rows: [N, ...].
        stochastic: whether rows of a table in bfloat16 are rounded at random.
    """
    if stochastic and table.dtype == torch.bfloat16:
        rows = round_at_random(rows)
    if ids is None:
        table.copy_(rows)
    else:
        table.index_copy_(0, ids, rows.to(table.dtype))


def per_row(column: Tensor, rows: Tensor) -> Tensor:
    """Reshape one number per row [N] to broadcast with rows [N, ...]."""
    return column.reshape(column.shape + (1,) * (rows.dim() - column.dim()))


def resized(table: Tensor, old_rows: int, new_rows: int, fill: float) -> Tensor:
    """Return the table without its last rows, or with new ones that start at `fill`."""
    fresh = table.new_full((max(0, new_rows - old_rows), *table.shape[1:]), fill)
    return torch.cat([table[:new_rows], fresh])
