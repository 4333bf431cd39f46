"""Masses of C classes as a cumulative sum, searched in a few local steps."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from manyclass._loaded_state import follow_loaded_state
from manyclass.kernels import cpu

ENTRIES_PER_CHUNK = 1 << 24
CLASSES_PER_STRETCH = 64
CELL_MARGIN = 1e-2  # in widths of a cell


class MassTable(nn.Module):
    """Class c owns the interval [start(c), end(c)) of the line [0, total); its mass is the interval's length.

    Masses are read back as differences of the stored sum, so a class is drawn with exactly the probability that
    its weight is later divided by, however the sum was rounded. Classes of mass 0 are not in the sum; the others
    are identified in it by their rank. Classes lie on the line in the order of their ids, or in a given order.

    A guide leads to the class at a position. The line is cut into stretches of equal length, and each stretch into
    about as many cells of equal length as classes begin in it; for each cell the guide holds the last class that
    begins before it. Only the few classes that begin in one cell remain to be searched; a binary search over the
    whole sum would miss the cache at most of its 27 steps for 10⁸ classes.

    Args:
        mass: float64 [C], finite and not negative.
        name: the argument of the sampler that holds the masses, for errors.
        order: int64 [C], the ids in the order in which they lie on the line; None: by id.

    Raises:
        ValueError: a mass is so small beside the others that it is lost in their sum.
    """

    _cumulative_bits: Tensor
    _zero: Tensor
    _order: Tensor | None
    _place: Tensor | None
    _ids: Tensor
    _intercept_bits: Tensor
    _slope_bits: Tensor
    _guide: Tensor
    _steps: tuple[int, ...]

    def __init__(self, mass: Tensor, *, name: str = "weights", order: Tensor | None = None) -> None:
        super().__init__()
        nothing = torch.empty(0, dtype=torch.int64)
        # Floats are stored as int64 bits: `.half()` and `.to(dtype)` convert every floating-point buffer.
        self.register_buffer("_cumulative_bits", nothing)
        self.register_buffer("_zero", nothing)
        self.register_buffer("_order", None)
        self.register_buffer("_place", None, persistent=False)
        for derived in ("_ids", "_intercept_bits", "_slope_bits", "_guide"):
            self.register_buffer(derived, nothing, persistent=False)
        self.rebuild(mass, name=name, order=order)
        follow_loaded_state(self, MassTable._after_load)

    def rebuild(self, mass: Tensor, *, name: str = "weights", order: Tensor | None = None) -> None:
        """Build the table from other masses; the arguments are those of the class."""
        if order is not None:
            mass = mass[order]
        self._order = order
        cumulative = mass.new_zeros(len(mass) + 1)
        torch.cumsum(mass, 0, out=cumulative[1:])
        if mass.device.type != "cpu":
            # A parallel sum may round a later entry below an earlier one.
            cumulative = cumulative.cummax(0).values
        zeros, kept = [], 0
        for start, part in _parts(mass):
            positive = part > 0
            ends = cumulative[start : start + len(part) + 1].clone()
            lost = positive & (ends[1:] == ends[:-1])
            if lost.any():
                c = start + int(lost.nonzero()[0])
                position = c if order is None else int(order[c])
                raise ValueError(
                    f"`{name}` must not span more than 15 orders of magnitude, got {mass[c].item():g} at position "
                    f"{position}, which is lost beside a total of {cumulative[-1].item():g}"
                )
            zeros.append((~positive).nonzero().squeeze(1) + start)
            ends = ends[1:][positive]
            # Entries are written at or before the place they are read from, so the gaps can be closed in place.
            cumulative[kept + 1 : kept + 1 + len(ends)] = ends
            kept += len(ends)
        self._cumulative_bits = cumulative[: kept + 1].view(torch.int64)
        self._zero = torch.cat(zeros)
        self._derive()

    def _after_load(self, _: object) -> None:
        """Raise ValueError if a loaded state is not a table, since a search would read past its end."""
        cumulative, zero = self._cumulative, self._zero
        num_classes = len(cumulative) - 1 + len(zero)
        # Equal neighbours are valid: a tiny mass may add nothing to a large sum.
        rising = cumulative.isfinite().all() and (cumulative.diff() >= 0).all()
        if cumulative.dim() != 1 or not len(cumulative) or cumulative[0] != 0 or not rising:
            raise ValueError("the table of a sampler must hold a sum that rises from 0, got another")
        if zero.dim() != 1 or (zero < 0).any() or (zero >= num_classes).any() or not (zero.diff() > 0).all():
            raise ValueError("the table of a sampler must leave out classes in ascending order, got others")
        if self._order is not None:
            wanted = torch.arange(num_classes, device=self.device)
            if self._order.shape != wanted.shape or not torch.equal(self._order.sort().values, wanted):
                raise ValueError("the table of a sampler must hold an order of all classes, got another")
        self._derive()

    def _derive(self) -> None:
        """Build the guide and the constants of the search. The only place that synchronises with the device."""
        cumulative = self._cumulative
        n = len(cumulative) - 1
        self.num_classes = n + len(self._zero)
        self._has_zero = len(self._zero) > 0
        self._ranks_are_ids = not self._has_zero and self._order is None
        if self._order is not None:
            self._place = torch.empty_like(self._order)
            self._place[self._order] = torch.arange(self.num_classes, device=self.device)
        self.total = float(cumulative[-1])
        stretches = -(-n // CLASSES_PER_STRETCH)
        self._scale = stretches / self.total if n else 0.0
        self._widest, self._steps = 0, ()
        self._cpu_table: cpu.SearchTable | None = None
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
        self._intercept_bits = torch.addcmul(offset, begin[:-1], slope, value=-1).view(torch.int64)
        self._slope_bits = slope.view(torch.int64)
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
        if not self._ranks_are_ids:
            # The places of the missing classes among the others: rank r lies at place r + #{places ≤ r}.
            places = self._zero - torch.arange(len(self._zero), device=self.device)
            self._ids = torch.empty(n, dtype=guide.dtype, device=self.device)
            for start, part in _parts(self._ids):
                rank = torch.arange(start, start + len(part), device=self.device)
                place = rank + torch.searchsorted(places, rank, right=True)
                part.copy_(place if self._order is None else self._order[place])

    def _cell(self, position: Tensor) -> Tensor:
        """Return the cells [N] of positions [N]."""
        stretch = (position * self._scale).long()
        intercept = self._intercept_bits.view(torch.float64).index_select(0, stretch)
        return intercept.addcmul_(self._slope_bits.view(torch.float64).index_select(0, stretch), position).long()

    @property
    def _cumulative(self) -> Tensor:
        return self._cumulative_bits.view(torch.float64)

    @property
    def device(self) -> torch.device:
        """The device of its tables."""
        return self._cumulative_bits.device

    @property
    def order(self) -> Tensor | None:
        """int64 [C]: the ids in the order of the line; None: by id."""
        return self._order

    def absent(self) -> Tensor:
        """Return the classes of mass 0, in ascending order."""
        return self._zero if self._order is None else self._order[self._zero].sort().values

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and masses of the classes that own these positions, float64 of any shape in [0, total]."""
        if cpu.is_available(position):
            return cpu.locate(self.cpu_table(), position)
        return self._locate(position)

    def cpu_table(self) -> cpu.SearchTable:
        """Return the table for compiled kernels, rebuilt if its tensors were replaced, for example by `.to`."""
        if self._cpu_table is None or self._cpu_table.cumulative is not self._cumulative_bits:
            ids = None if self._ranks_are_ids else self._ids
            bits = (self._cumulative_bits, self._intercept_bits, self._slope_bits)
            self._cpu_table = cpu.SearchTable(*bits, self._scale, self._widest, self._guide, ids)
        return self._cpu_table

    def _locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `locate`: the eager reference."""
        shape, position = position.shape, position.reshape(-1)
        cumulative = self._cumulative
        rank = self._guide.index_select(0, self._cell(position))
        for step in self._steps:
            probe = rank + step
            rank = torch.where(cumulative.index_select(0, probe) <= position, probe, rank)
        mass = cumulative.index_select(0, rank + 1).sub_(cumulative.index_select(0, rank))
        ids = rank if self._ranks_are_ids else self._ids.index_select(0, rank)
        return ids.long().reshape(shape), mass.reshape(shape)

    def interval(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the starts and ends of classes on the line; a class of mass 0 has an empty interval."""
        place = ids if self._place is None else self._place.take(ids)
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
