"""Rows of a table: taken, put back, added and retired."""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and state for a parameter: small updates vanish beside a weight in half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def take(table: Tensor, ids: Tensor | None) -> Tensor:
    """Rows to be changed in place and then `put` back. Without ids they may be the table itself, not a copy."""
    rows = table if ids is None else table.index_select(0, ids)
    return rows.to(wide(rows.dtype))


def put(table: Tensor, ids: Tensor | None, rows: Tensor) -> None:
    """Write rows that were taken; those that are the table itself are there already."""
    if ids is None:
        table.copy_(rows)
    else:
        table.index_copy_(0, ids, rows.to(table.dtype))


def per_row(column: Tensor, rows: Tensor) -> Tensor:
    """A number for each row [N], shaped to meet rows [N, ...]."""
    return column.reshape(column.shape + (1,) * (rows.dim() - column.dim()))


def resized(table: Tensor, old_rows: int, new_rows: int, fill: float) -> Tensor:
    """The table without its last rows, or with new ones that start at `fill`."""
    fresh = table.new_full((max(0, new_rows - old_rows), *table.shape[1:]), fill)
    return torch.cat([table[:new_rows], fresh])
