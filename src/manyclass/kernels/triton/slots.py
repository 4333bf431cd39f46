"""The slots of a draw as kernels see them: columns of one matrix of scores, part by part."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.candidates import Block, Candidates
from manyclass.kernels.triton.sizes import next_power_of_2

TILE = 2048  # scores that a program holds at once: of as many columns as there are, and then of more rows
MIN_COLUMNS, MAX_ROWS = 128, 4
ELEMENTS_PER_WARP = 512
MAX_PARTS = 3  # a block of explicit classes, a draw, and included classes
MAX_COMPARED = 16  # exclusions per example that a kernel compares with every slot; more come as a mask


@dataclass(frozen=True)
class Part:
    """Classes that are scored by one batched product.

    Args:
        ids: int64 [G, K]; the rows of the batch are divided into G runs of `size`.
        log_kappa: float64 [G, K].
        size: the examples of a group.
        first: the first column of its slots among those of all parts.
        place: the first of its G·K slots among those of all parts, group after group.
        drawn: whether its classes are drawn, so that excluded ones count as empty; included classes are not.
    """

    ids: Tensor
    log_kappa: Tensor
    size: int
    first: int
    place: int
    drawn: bool


@dataclass(frozen=True)
class Layout:
    """The parts of a draw, with the batch in the order of its groups.

    Args:
        parts: the parts.
        order: int64 [B], the example of each row; None: rows are examples.
        batch: B.
        rows: the rows of the matrix of scores: B, and those that pad the last group.
        columns: the slots of an example.
        excluded: int64 [B, E], compared with drawn slots.
        mask: bool [rows, columns], True for an empty slot, in place of `excluded` if E is large; None: there is none.
        num_classes: C.
    """

    parts: tuple[Part, ...]
    order: Tensor | None
    batch: int
    rows: int
    columns: int
    excluded: Tensor
    mask: Tensor | None
    num_classes: int

    @classmethod
    def of(cls, candidates: Candidates, target: Tensor) -> "Layout | None":
        """Return the layout of a draw; None if there is none: no slots, too many parts, or two orders of the batch."""
        orders = [block.order for block in candidates.blocks if block.order is not None]
        blocks = candidates.parts(empty=target)
        if len(blocks) > MAX_PARTS or any(order is not orders[0] for order in orders):
            return None
        order, batch = orders[0] if orders else None, len(target)
        parts: list[Part] = []
        first = place = 0
        rows = batch
        for i, block in enumerate(blocks):
            block = _sorted(block, order, batch)
            groups, k = block.ids.shape
            if k == 0:
                continue
            size = -(-batch // groups)
            parts.append(Part(block.ids, block.log_kappa, size, first, place, i < len(candidates.blocks)))
            first, place = first + k, place + groups * k
            rows = max(rows, groups * size)
        if first == 0:
            return None
        excluded, mask = candidates.excluded.contiguous(), None
        if excluded.shape[1] > MAX_COMPARED:
            mask = _mask(candidates, order, rows, first)
            excluded = excluded[:, :0].contiguous()
        return cls(tuple(parts), order, batch, rows, first, excluded, mask, candidates.num_classes)

    @cached_property
    def log_kappa(self) -> Tensor:
        """float64 [Σ G·K]: log κ of all slots, part by part."""
        found = [part.log_kappa.reshape(-1) for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments by name of a kernel that goes over all slots and sums in a dtype."""
        found: dict[str, Any] = {
            "excluded": self.excluded,
            "mask": self.mask,
            "order": self.order,
            "batch": self.batch,
            "rows": self.rows,
            "columns": self.columns,
            "num_excluded": self.excluded.shape[1],
            "PARTS": len(self.parts),
            "INCLUDED": not self.parts[-1].drawn,
            "HAS_ORDER": self.order is not None,
            "HAS_MASK": self.mask is not None,
            "WIDE": tl.float64 if dtype == torch.float64 else tl.float32,
            **tile(max(part.ids.shape[1] for part in self.parts)),
        }
        for i in range(MAX_PARTS):
            part = self.parts[i] if i < len(self.parts) else None
            numbers = (part.ids.shape[1], part.size, part.place) if part else (1, 1, 0)
            found[f"k{i}"], found[f"size{i}"], found[f"place{i}"] = numbers
            found[f"SHARED{i}"] = part is not None and part.ids.shape[0] == 1
        return found


@dataclass(frozen=True)
class Operands:
    """The operands of a kernel that goes over all slots, beside the inner products of the slots.

    Args:
        hidden: [rows, D], in the order of the groups.
        target_rows: [B, D], by example.
        offset: float32 or float64 [Σ G·K], what is added to the products of the slots; -inf: empty.
        ids: int32 or int64 [Σ G·K], the classes of the slots.
        target_offset: [B], what is added to the products of the targets; None: nothing.
        valid: bool [B], False for ignored examples, whose loss and gradient are 0; None: there are none.
    """

    hidden: Tensor
    target_rows: Tensor
    offset: Tensor
    ids: Tensor
    target_offset: Tensor | None
    valid: Tensor | None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a kernel by name."""
        return {
            "hidden": self.hidden,
            "target_rows": self.target_rows,
            "offset": self.offset,
            "ids": self.ids,
            "target_offset": self.target_offset,
            "valid": self.valid,
            "dim": self.hidden.shape[1],
            "HAS_OFFSET": self.target_offset is not None,
            "HAS_VALID": self.valid is not None,
        }


def tile(k: int) -> dict[str, int]:
    """Return the rows and columns of the tiles of scores that a kernel works on, and its warps, for k slots."""
    columns = max(MIN_COLUMNS, min(TILE, next_power_of_2(k)))
    rows = min(MAX_ROWS, TILE // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": max(1, rows * columns // ELEMENTS_PER_WARP)}


def _sorted(block: Block, order: Tensor | None, batch: int) -> Block:
    """Return a block whose groups are runs of the sorted batch."""
    if order is None or block.order is not None or block.ids.shape[0] == 1:
        return block
    # A group for each example moves with it; larger groups of another block would be torn apart.
    spread = [block.spread(x, batch)[order] for x in (block.ids, block.log_kappa)]
    return Block(*spread)


def _mask(candidates: Candidates, order: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return a mask [rows, columns] of the drawn slots that hold a class that the example excludes."""
    hits = torch.cat([candidates.block_hits(block) for block in candidates.blocks], 1)
    mask = torch.zeros(rows, columns, dtype=torch.bool, device=hits.device)
    mask[: len(hits), : hits.shape[1]] = hits if order is None else hits[order]
    return mask


@triton.jit  # type: ignore[untyped-decorator]
def target_scores(  # type: ignore[no-untyped-def]
    hidden,
    target_rows,
    target_offset,
    row,
    example,
    present,
    dim,
    HAS_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    """Return s(target) [ROWS], with what is added to it.

    Args:
        hidden: [rows, D], in the order of the groups.
        target_rows: [B, D], by example.
        target_offset: [B], by example, if HAS_OFFSET.
        row, example, present: as in `slot_scores`.
        dim: D.
        HAS_OFFSET: whether there is something to add.
        WIDE: the dtype of sums.
        ROWS, COLUMNS: of a tile.
    """
    t = tl.zeros([ROWS], WIDE)
    for start in range(0, dim, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = present[:, None] & (column < dim)[None, :]
        h = tl.load(hidden + row[:, None] * dim + column[None, :], mask=inside, other=0.0).to(WIDE)
        w = tl.load(target_rows + example[:, None] * dim + column[None, :], mask=inside, other=0.0).to(WIDE)
        t += tl.sum(h * w, 1)
    if HAS_OFFSET:
        t += tl.load(target_offset + example, mask=present, other=0.0).to(WIDE)
    return t


@triton.jit  # type: ignore[untyped-decorator]
def slot_scores(  # type: ignore[no-untyped-def]
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
    SHARED: tl.constexpr,
    DRAWN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDE: tl.constexpr,
) -> Any:
    """Return s + offset of a tile of slots [ROWS, COLUMNS] of one part, -inf where a slot is empty or excluded.

    Args:
        scores: [rows, columns], inner products.
        offset, ids, excluded, mask: as in `Operands` and `Layout`.
        row, example, present: int64 [ROWS], int64 [ROWS] and bool [ROWS]; rows that pad a group are not present.
        column: int32 [COLUMNS], the slots of the part.
        first, k, size, place: of the part.
        columns: the slots of all parts.
        num_excluded: E.
        SHARED: whether the whole batch shares the part, so that what belongs to a slot is read once for all rows.
        DRAWN: whether excluded classes count as empty.
        HAS_MASK: whether there is a mask.
        WIDE: the dtype of sums.
    """
    inside = present[:, None] & (column < k)[None, :]
    at = row[:, None] * columns + first + column[None, :]
    if SHARED:
        slot = (place + column)[None, :]
        known = (column < k)[None, :]
    else:
        slot = place + (row // size)[:, None] * k + column[None, :]
        known = inside
    s = tl.load(scores + at, mask=inside, other=0.0).to(WIDE)
    added = tl.load(offset + slot, mask=known, other=float("-inf")).to(WIDE)
    # An empty slot is filled, not added to: its score may be infinite.
    empty = (added == float("-inf")) | ~inside
    if HAS_MASK:
        empty = empty | (tl.load(mask + at, mask=inside, other=1) != 0)
    if DRAWN:
        if num_excluded > 0:
            found = tl.load(ids + slot, mask=known, other=-1)
            for e in range(num_excluded):
                other = tl.load(excluded + example * num_excluded + e, mask=present, other=-2).to(found.dtype)
                empty = empty | (found == other[:, None])
    return tl.where(empty, float("-inf"), s + added)
