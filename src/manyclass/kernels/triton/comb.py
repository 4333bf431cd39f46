"""A comb that falls on a line of classes: the classes under its teeth and their log κ, in one kernel."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.kernels.triton.sizes import cdiv

TEETH = 128  # of a program
WARPS = 4


@dataclass(frozen=True)
class SearchTable:
    """The tensors of a `MassTable`, and the constants of its search.

    Args:
        cumulative, intercept, slope, guide: as in `MassTable`.
        numbers: float64 [2]: the stretches per unit of mass, and the widest cell.
        ids: the class of each rank; None: the rank itself, or as `gaps` say.
        gaps: int64 [Z], ascending: the class of rank r is r + #{gaps ≤ r}; None: there are none.
    """

    cumulative: Tensor
    intercept: Tensor
    slope: Tensor
    guide: Tensor
    numbers: Tensor
    ids: Tensor | None
    gaps: Tensor | None


def comb(table: SearchTable, offset: Tensor, spacing: Tensor, k: int, certain: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [G, k] and log κ, float64: first the n classes that are certain, then those under the k - n teeth.

    Args:
        table: the masses of the others.
        offset: float64 [G, 1], in [0, 1); [G, k - n]: one for each tooth.
        spacing: float64 [2]: the spacing of the teeth, and n. If it is 0, slots behind the certain classes are empty.
        k: the number of slots.
        certain: int64 [n or more].
    """
    groups, offsets = offset.shape
    ids = torch.empty(groups, k, dtype=torch.int64, device=offset.device)
    log_kappa = torch.empty(groups, k, dtype=torch.float64, device=offset.device)
    if k == 0:
        return ids, log_kappa
    with torch.cuda.device_of(offset):
        _comb[(cdiv(k, TEETH) * groups,)](
            table.cumulative,
            table.intercept,
            table.slope,
            table.guide,
            table.ids,
            table.gaps,
            table.numbers,
            offset,
            spacing,
            certain,
            ids,
            log_kappa,
            k,
            offsets,
            0 if table.gaps is None else len(table.gaps),
            HAS_IDS=table.ids is not None,
            HAS_GAPS=table.gaps is not None,
            TEETH=TEETH,
            num_warps=WARPS,
        )
    return ids, log_kappa


@triton.jit  # type: ignore[untyped-decorator]
def _comb(  # type: ignore[no-untyped-def]
    cumulative,
    intercept,
    slope,
    guide,
    class_of,
    gaps,
    numbers,
    offset,
    spacing,
    certain,
    ids,
    log_kappa,
    k,
    offsets,
    num_gaps,
    HAS_IDS: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    TEETH: tl.constexpr,
) -> Any:
    per_group = tl.cdiv(k, TEETH)
    group = (tl.program_id(0) // per_group).to(tl.int64)
    slot = (tl.program_id(0) % per_group) * TEETH + tl.arange(0, TEETH)
    inside = slot < k
    unit, num_certain = tl.load(spacing), tl.load(spacing + 1).to(tl.int32)
    is_certain = slot < num_certain
    # Without teeth the slots behind the certain classes are empty.
    end = tl.where(unit > 0, k, num_certain)
    on_line = (slot >= num_certain) & (slot < end)
    tooth = slot - num_certain
    # With one offset for all teeth, every tooth reads the first.
    own = tl.load(offset + group * offsets + tl.where(offsets > 1, tooth, 0), mask=on_line, other=0.0)
    position = (own + tooth.to(tl.float64)) * unit
    stretch = (position * tl.load(numbers)).to(tl.int64)
    start, rise = tl.load(intercept + stretch, mask=on_line), tl.load(slope + stretch, mask=on_line)
    cell = (start + rise * position).to(tl.int64)
    rank = tl.load(guide + cell, mask=on_line, other=0).to(tl.int64)
    # A binary search among the classes that begin in the cell.
    width = tl.load(numbers + 1).to(tl.int32)
    while width > 0:
        step = (width + 1) // 2
        reached = tl.load(cumulative + rank + step, mask=on_line, other=float("inf")) <= position
        rank = tl.where(reached, rank + step, rank)
        width -= step
    first = tl.load(cumulative + rank, mask=on_line, other=0.0)
    mass = tl.load(cumulative + rank + 1, mask=on_line, other=1.0) - first
    found = rank
    if HAS_IDS:
        found = tl.load(class_of + rank, mask=on_line, other=0).to(tl.int64)
    if HAS_GAPS:
        left = num_gaps
        before = tl.zeros([TEETH], tl.int64)
        while left > 0:
            step = (left + 1) // 2
            passed = tl.load(gaps + before + step - 1, mask=on_line, other=0) <= rank
            before = tl.where(passed, before + step, before)
            left -= step
        found = rank + before
    # An empty slot holds a class that is certain.
    known = tl.load(certain + tl.where(is_certain, slot, 0), mask=is_certain | (inside & ~on_line), other=0)
    at = group * k + slot
    tl.store(ids + at, tl.where(on_line, found, known), mask=inside)
    kappa = tl.where(is_certain, 0.0, float("-inf"))
    kappa = tl.where(on_line, tl.log(unit) - tl.log(mass), kappa)
    tl.store(log_kappa + at, kappa, mask=inside)
