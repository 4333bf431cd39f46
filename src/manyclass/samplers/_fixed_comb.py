"""A comb in storage of fixed addresses and sizes, for a step that a GPU replays."""

import math

import torch
from torch import Tensor

from manyclass.candidates import Block
from manyclass.kernels import runs_triton
from manyclass.samplers._comb import Comb


class FixedComb:
    """A copy of a comb that can be overwritten by its successors, so that a recorded draw reads the newest.

    A rebuild changes how many classes are certain, the spacing of the teeth and the sizes of the tables. Here sizes are
    the largest that C classes need, numbers lie in tensors on the device, and a draw always has k slots.

    Args:
        comb: the first one; it is undivided.
    """

    def __init__(self, comb: Comb) -> None:
        self.k, self.num_classes = comb.k, comb.num_classes
        cumulative, _, _, guide, _ = comb.table.search_tensors()
        size, stretches = self.num_classes, comb.table.stretches_of(self.num_classes)
        self._cumulative = cumulative.new_empty(size + 1)
        self._intercept, self._slope = (cumulative.new_zeros(stretches + 1) for _ in range(2))
        # A cell for each class, and one more for each stretch.
        self._guide = guide.new_zeros(size + stretches + 2)
        self._ids, self._place, self._zero = (guide.new_zeros(size) for _ in range(3))
        self._certain = guide.new_zeros(self.k, dtype=torch.int64)
        self._numbers, self._spacing = cumulative.new_zeros(2), cumulative.new_zeros(2)
        self._slots = torch.arange(self.k, device=comb.device)
        self._held: Comb | None = None
        self.load(comb)

    def fits(self, comb: Comb) -> bool:
        """Return True if a comb can be loaded."""
        guide = comb.table.search_tensors()[3]
        same = comb.k == self.k and comb.num_classes == self.num_classes and comb.device == self._slots.device
        return same and guide.dtype == self._guide.dtype

    def load(self, comb: Comb) -> None:
        """Copy a comb into the storage, unless it is the one that was copied last."""
        if comb is self._held:
            return
        self._held = comb
        cumulative, intercept, slope, guide, numbers = comb.table.search_tensors()
        ids = comb.table.ids()
        n = len(cumulative) - 1
        self._cumulative[: n + 1].copy_(cumulative)
        # Behind the end of the line, for a search over all of the storage.
        self._cumulative[n + 1 :].fill_(math.inf)
        for storage, values in ((self._intercept, intercept), (self._slope, slope), (self._guide, guide)):
            storage[: len(values)].copy_(values)
        self._ids[:n].copy_(torch.arange(n, device=self._ids.device) if ids is None else ids)
        self._numbers.copy_(numbers)
        place, zero = comb.table.places()
        self._place.copy_(torch.arange(self.num_classes, device=self._place.device) if place is None else place)
        # No class lies behind the last.
        self._zero.fill_(self.num_classes)[: len(zero)].copy_(zero)
        self._certain[: len(comb.certain)].copy_(comb.certain)
        self._spacing.copy_(comb.numbers)

    def draw(self, groups: int, *, generator: torch.Generator | None) -> Block:
        """Return the block [G, k] of the classes that the comb draws, the certain ones in front of the others."""
        offset = torch.rand(groups, 1, dtype=torch.float64, device=self._slots.device, generator=generator)
        if runs_triton(offset):
            from manyclass.kernels.triton import comb as gpu

            tables = self._cumulative, self._intercept, self._slope, self._guide, self._numbers
            table = gpu.SearchTable(*tables, self._ids, None)
            return Block(*gpu.comb(table, offset, self._spacing, self.k, self._certain))
        unit, number = self._spacing.unbind()
        on_line = (self._slots >= number) & (unit > 0)
        position = (offset + (self._slots - number).clamp(min=0)) * unit
        rank = torch.searchsorted(self._cumulative, position, right=True).sub_(1).clamp_(0, self.num_classes - 1)
        mass = self._cumulative[rank + 1] - self._cumulative[rank]
        is_certain = self._slots < number
        # An empty slot holds a class that is certain.
        known = self._certain[torch.where(is_certain, self._slots, 0)]
        ids = torch.where(on_line, self._ids[rank].long(), known)
        log_kappa = torch.where(on_line, unit.log() - mass.log(), torch.where(is_certain, 0.0, -math.inf))
        return Block(ids, log_kappa)

    def log_kappa(self, ids: Tensor) -> Tensor:
        """Return log κ of classes, 0 for those that are certain."""
        place = self._place[ids].long()
        before = torch.searchsorted(self._zero, place)
        absent = self._zero.take(before.clamp(max=self.num_classes - 1)) == place
        rank = place - before
        behind = torch.where(absent, rank, rank + 1)
        mass = self._cumulative[behind] - self._cumulative[rank]
        return torch.where(mass > 0, self._spacing[0].log() - mass.log(), 0.0)
