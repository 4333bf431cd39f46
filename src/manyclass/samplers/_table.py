"""Masses of C classes as a cumulative sum, searched in a few local steps."""

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyclass._plain_state import index_dtype
from manyclass._shard import Shard
from manyclass.kernels import cpu

if TYPE_CHECKING:
    from manyclass.kernels.triton import comb as gpu

ENTRIES_PER_CHUNK = 1 << 24
CLASSES_PER_STRETCH = 64
CELL_MARGIN = 1e-2  # in widths of a cell
MAX_GAPS = 1 << 16  # classes of mass 0 that are searched; of more, the id of every other class is kept
MASS_BITS = 52
TOTAL_MARGIN = 2.0**-40
MIN_TOTAL, MAX_TOTAL = 1e-280, 1e300


class MassTable:
    """Class c owns the interval [start(c), end(c)) of the line [0, total); its mass is the interval's length.

    Masses are rounded to multiples of a power of two, of which the total has fewer than 2⁵²: then every sum of them is
    exact in float64, in any order and however the classes are split. A class is drawn with exactly the probability
    that its weight is later divided by, and a table built from masses that were read back is the same. Classes of mass
    0 are not in the sum; the others are identified in it by their rank. Classes lie on the line in the order of their
    ids, or in a given order. A table never changes.

    A guide leads to the class at a position. The line is cut into stretches of equal length, and each stretch into
    about as many cells of equal length as classes begin in it; for each cell the guide holds the last class that
    begins before it. Only the few classes that begin in one cell remain to be searched; a binary search over the
    whole sum would miss the cache at most of its 27 steps for 10⁸ classes.

    Args:
        mass: float64 [C], finite and not negative.
        name: the argument of the sampler that holds the masses, for errors.
        order: int64 [C], the ids in the order in which they lie on the line; None: by id.
        shard: the classes of this process, if the line is divided among processes; it has its own part of the line.

    Raises:
        ValueError: the sum of the masses is too small or too large for its multiples in float64.
    """

    def __init__(
        self, mass: Tensor, *, name: str = "weights", order: Tensor | None = None, shard: Shard | None = None
    ) -> None:
        self.num_classes = len(mass)
        index = index_dtype(self.num_classes)
        self._order = self._place = None
        if order is not None:
            mass = mass[order]
            self._order = order.to(index)
            self._place = torch.empty_like(self._order)
            self._place[order] = torch.arange(self.num_classes, dtype=index, device=order.device)
        mass = _exact(mass, name, shard)
        cumulative = mass.new_zeros(len(mass) + 1)
        torch.cumsum(mass, 0, out=cumulative[1:])
        zeros, kept = [torch.empty(0, dtype=torch.int64, device=mass.device)], 0
        for start, part in _parts(mass):
            positive = part > 0
            zeros.append((~positive).nonzero().squeeze(1) + start)
            ends = cumulative[start + 1 : start + 1 + len(part)][positive]
            # Entries are written at or before the place they are read from, so the gaps can be closed in place.
            cumulative[kept + 1 : kept + 1 + len(ends)] = ends
            kept += len(ends)
        # A copy if much was left out, so that its memory is freed.
        self._cumulative = cumulative if kept == len(mass) else cumulative[: kept + 1].clone()
        self._zero = torch.cat(zeros)
        self._derive(index)

    def _derive(self, index: torch.dtype) -> None:
        """Build the guide and the constants of the search."""
        cumulative = self._cumulative
        n = len(cumulative) - 1
        self._has_zero = len(self._zero) > 0
        # The classes by rank: given, or the ranks themselves, or found by counting the classes of mass 0 in front.
        self._ids: Tensor | None = None
        self._gaps: Tensor | None = None
        self._cpu_table: cpu.SearchTable | None = None
        self.total = float(cumulative[-1])
        stretches = self.stretches_of(n)
        self._scale = stretches / self.total if n else 0.0
        self._widest: int = 0
        self._steps: tuple[int, ...] = ()
        nothing = torch.empty(0, dtype=torch.float64, device=self.device)
        self._intercept, self._slope, self._guide = nothing, nothing, nothing.to(index)
        self._numbers = nothing.new_zeros(2)  # of the search, for a kernel that reads them on the device
        if n == 0:
            return
        # One more stretch, empty, for positions that rounding moves to the end of the line.
        begin = torch.arange(stretches + 2, dtype=torch.float64, device=cumulative.device).div_(self._scale)
        # cell = floor(intercept + slope · position). A margin keeps both ends of a stretch inside its own cells
        # whatever the product rounds to, so that later positions never have earlier cells. The product is about
        # stretches · cells, so a crowded stretch gets no more cells than leave its rounding within the margin.
        most = max(1.0, CELL_MARGIN / (8 * torch.finfo(torch.float64).eps * stretches))
        # One cell more than there are classes, so that every stretch has a cell.
        cells = torch.searchsorted(cumulative[:-1], begin).diff().double().clamp_(max=most).floor_().add_(1.0)
        slope = (cells - 2 * CELL_MARGIN).mul_(self._scale)
        offset = cells.cumsum(0).sub_(cells).add_(CELL_MARGIN)
        self._intercept, self._slope = torch.addcmul(offset, begin[:-1], slope, value=-1), slope
        num_cells = int(cells.sum())
        del begin, cells, slope, offset
        cell = torch.empty(n, dtype=torch.int32 if num_cells < 2**31 else torch.int64, device=cumulative.device)
        for start, part in _parts(cell):
            part.copy_(self._cell(cumulative[start : start + len(part)]))
        guide = torch.empty(num_cells + 1, dtype=cell.dtype, device=cell.device)
        for start, part in _parts(guide):
            here = torch.arange(start, start + len(part), dtype=cell.dtype, device=cell.device)
            part.copy_(torch.searchsorted(cell, here).sub_(1).clamp_(min=0))
        del cell
        widest = max(
            int(guide[start : start + ENTRIES_PER_CHUNK + 1].diff().max())
            for start in range(0, num_cells, ENTRIES_PER_CHUNK)
        )
        # Starting earlier near the end keeps the steps, which sum to the widest cell, inside the table.
        self._guide = guide.clamp_(max=n - 1 - widest)
        self._widest, self._steps = widest, _halvings(widest)
        self._numbers = torch.tensor([self._scale, widest], dtype=torch.float64, device=self.device)
        if not self._has_zero:
            self._ids = self._order if self._order is None else self._order.to(guide.dtype)
        else:
            # The places of the missing classes among the others: rank r lies at place r + #{places ≤ r}.
            gaps = self._zero - torch.arange(len(self._zero), device=self.device)
            if self._order is None and len(gaps) <= MAX_GAPS:
                self._gaps = gaps
            else:
                self._ids = self._ids_behind(gaps)

    def _ids_behind(self, gaps: Tensor) -> Tensor:
        """Return the ids [n] of all ranks, with the dtype of the guide."""
        ids = torch.empty(len(self._cumulative) - 1, dtype=self._guide.dtype, device=self.device)
        for start, part in _parts(ids):
            rank = torch.arange(start, start + len(part), device=self.device)
            place = rank + torch.searchsorted(gaps, rank, right=True)
            part.copy_(place if self._order is None else self._order[place])
        return ids

    def ids(self) -> Tensor | None:
        """Return the ids [n] of all ranks; None if they are equal."""
        return self._ids if self._gaps is None else self._ids_behind(self._gaps)

    def _cell(self, position: Tensor) -> Tensor:
        """Return the cells [N] of positions [N]."""
        stretch = (position * self._scale).long()
        intercept = self._intercept.index_select(0, stretch)
        return intercept.addcmul_(self._slope.index_select(0, stretch), position).long()

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self._cumulative.device

    @property
    def order(self) -> Tensor | None:
        """int64 [C]: the ids in the order of the line; None: by id."""
        return None if self._order is None else self._order.long()

    @property
    def line(self) -> Tensor:
        """int32 or int64 [C]: the ids in the order of the line; [0]: by id."""
        return self._guide.new_empty(0, dtype=index_dtype(self.num_classes)) if self._order is None else self._order

    def to(self, device: torch.device) -> "MassTable":
        """Return the same table on a device."""
        if device == self.device:
            return self
        moved = copy.copy(self)
        moved._cpu_table = None
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device))
        return moved

    def masses(self) -> Tensor:
        """Return the masses of all classes, float64 [C]."""
        return self.mass(torch.arange(self.num_classes, device=self.device))

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and masses of the classes that own these positions, float64 of any shape in [0, total]."""
        if cpu.is_available(position):
            return cpu.locate(self.cpu_table(), position)
        return self._locate(position)

    def cpu_table(self) -> cpu.SearchTable:
        """Return the table for compiled kernels, which check it once."""
        if self._cpu_table is None:
            tensors = self._cumulative, self._intercept, self._slope
            self._cpu_table = cpu.SearchTable(*tensors, self._scale, self._widest, self._guide, self.ids())
        return self._cpu_table

    def search_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the sums, intercepts, slopes and guide of a search, and its two constants."""
        return self._cumulative, self._intercept, self._slope, self._guide, self._numbers

    def places(self) -> tuple[Tensor | None, Tensor]:
        """Return the place of each class on the line, None: by id, and the places of classes of mass 0, ascending."""
        return self._place, self._zero

    @staticmethod
    def stretches_of(classes: int) -> int:
        """Return the number of stretches of a line with this number of classes."""
        return -(-classes // CLASSES_PER_STRETCH)

    def gpu_table(self) -> "gpu.SearchTable":
        """Return the table for Triton's kernels. It is not kept: a copy of it could not be loaded without Triton."""
        from manyclass.kernels.triton import comb as gpu

        return gpu.SearchTable(*self.search_tensors(), self._ids, self._gaps)

    def _locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `locate`: the eager reference."""
        shape, position = position.shape, position.reshape(-1)
        cumulative = self._cumulative
        if torch.compiler.is_compiling():
            # The constants of the guide would be constants of the graph, which every rebuild would compile again.
            rank = torch.searchsorted(cumulative, position, right=True).sub_(1).clamp_(max=len(cumulative) - 2)
        else:
            rank = self._guide.index_select(0, self._cell(position))
            for step in self._steps:
                probe = rank + step
                rank = torch.where(cumulative.index_select(0, probe) <= position, probe, rank)
        mass = cumulative.index_select(0, rank + 1).sub_(cumulative.index_select(0, rank))
        ids = rank if self._ids is None else self._ids.index_select(0, rank)
        if self._gaps is not None:
            ids = rank + torch.searchsorted(self._gaps, rank.long(), right=True)
        return ids.long().reshape(shape), mass.reshape(shape)

    def interval(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the starts and ends of classes on the line; a class of mass 0 has an empty interval."""
        place = ids if self._place is None else self._place[ids].long()
        cumulative, rank, behind = self._cumulative, place, place + 1
        if self._has_zero:
            before = torch.searchsorted(self._zero, place)
            absent = self._zero.take(before.clamp(max=len(self._zero) - 1)) == place
            rank = place - before
            behind = torch.where(absent, rank, rank + 1)
        return cumulative.take(rank), cumulative.take(behind)

    def mass(self, ids: Tensor) -> Tensor:
        """Return the masses of classes."""
        start, end = self.interval(ids)
        return end.sub_(start)


def _exact(mass: Tensor, name: str, shard: Shard | None = None) -> Tensor:
    """Return the masses as multiples of a power of two, such that all sums are exact; a positive one stays positive."""

    def total_of(mass: Tensor) -> float:
        total = float(mass.sum())
        return total if shard is None else shard.sum(total)

    total = total_of(mass)
    if total and not MIN_TOTAL <= total <= MAX_TOTAL:
        raise ValueError(f"`{name}` must have a sum between {MIN_TOTAL:g} and {MAX_TOTAL:g}, got {total:g}")
    bits: int | None = None
    # Rounding may carry the total to the next power of two: those sums need another bit.
    while total and bits != _bits(total):
        bits = _bits(total)
        quantum = math.ldexp(1.0, bits - MASS_BITS)
        rounded = torch.empty_like(mass)
        for start, part in _parts(mass):
            multiple = (part / quantum).round_().clamp_(min=1.0)
            rounded[start : start + len(part)] = multiple.mul_(quantum).masked_fill_(part == 0, 0.0)
        mass, total = rounded, total_of(rounded)
    return mass


def _bits(total: float) -> int:
    # Frequencies sum to 1 but for rounding, which depends on how they are divided among processes: 1 - 1e-16 must not
    # have finer multiples than 1.
    return math.frexp(total * (1 + TOTAL_MARGIN))[1]


def _parts(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the start of each part of x and the part, so that temporaries stay small."""
    for start in range(0, len(x), ENTRIES_PER_CHUNK):
        yield start, x[start : start + ENTRIES_PER_CHUNK]


def _halvings(width: int) -> tuple[int, ...]:
    """Return the steps of a binary search over 0 … width that never goes beyond it."""
    steps = []
    while width:
        steps.append((width + 1) // 2)
        width -= steps[-1]
    return tuple(steps)
