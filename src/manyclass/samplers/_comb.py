"""A comb of evenly spaced teeth that falls on a line of classes."""

import copy
import math

import torch
from torch import Tensor

from manyclass import _check
from manyclass._plain_state import saved_permutation, saved_vector
from manyclass._shard import Shard
from manyclass.candidates import Block, put_in_front
from manyclass.kernels import cpu, runs_triton
from manyclass.samplers._inclusion import split_certain
from manyclass.samplers._table import MassTable

CERTAIN = -1.0  # the weight of a class that is certain; an infinite one would look like a damaged state


class Comb:
    """k teeth over C classes with inclusion probabilities π = min(1, a·weight), a solved for Σ π = k. It never changes.

    Classes of π = 1 are in every draw, so they are off the line and have no tooth.

    The line may be divided among processes. Then each holds the table of its part, and draws the classes under the
    teeth that fall on it. Sums of masses are exact, so the classes and their κ do not depend on the division.

    Args:
        mass: float64 [C]; 0 for the classes that are certain or never drawn.
        certain: int64 [n], ascending: the classes of π = 1.
        k: classes drawn.
        order: int64 [C], the ids in the order of the line; None: by id.
        shard: the classes of this process, to which `mass` and `certain` belong; None: all.
    """

    def __init__(
        self, mass: Tensor, certain: Tensor, k: int, *, order: Tensor | None = None, shard: Shard | None = None
    ) -> None:
        self.table = MassTable(mass, order=order, shard=shard)
        self.certain = certain
        self.k = k
        self.shard = shard
        lengths, numbers, here = [self.table.total], [len(certain)], 0
        if shard is not None:
            lengths, numbers = shard.numbers(self.table.total, len(certain)).T.tolist()
            here = shard.rank
        self.total, self.start = math.fsum(lengths), math.fsum(lengths[:here])
        teeth = k - int(sum(numbers)) if self.total else 0
        self.spacing = self.total / max(teeth, 1)
        first, end = 0, teeth
        # Rounding may move a position to the end of the line.
        self._end = self.start + self.table.total if any(lengths[here + 1 :]) else math.inf
        if shard is not None:
            # With any offset below 1 the teeth of this part of the line are among these.
            first = max(0, math.floor(self.start / (self.spacing or 1.0)) - 1)
            end = min(teeth, math.ceil((self.start + self.table.total) / (self.spacing or 1.0)) + 1)
            end = max(first, end) if self.table.total else first
        # For compiled graphs, in which numbers would be constants: a rebuild changes all of them.
        self._tooth = torch.arange(first, end, dtype=torch.float64, device=mass.device)
        self._unit = torch.tensor(self.spacing, dtype=torch.float64, device=mass.device)
        # The same and the number of certain classes, for a kernel: with these in its block, and without them.
        for_kernel = [self.spacing, float(len(certain)), self.spacing, 0.0]
        self._spacing = torch.tensor(for_kernel, dtype=torch.float64, device=mass.device).view(2, 2)
        self._total = torch.tensor(self.total, dtype=torch.float64, device=mass.device)
        self._number_of_teeth = teeth

    @classmethod
    def of(cls, weight: Tensor, k: int, *, order: Tensor | None = None, shard: Shard | None = None) -> "Comb":
        """Return the comb for weights float64 [C]; a class of weight 0 is never drawn."""
        total = float(weight.sum())
        if not math.isfinite(total if shard is None else shard.sum(total)):
            raise ValueError("`weights` must have a finite sum, got one that is infinite or NaN")
        return cls(*split_certain(weight, k, shard), k, order=order, shard=shard)

    @classmethod
    def restored(cls, weights: Tensor, line: Tensor, num_classes: int, k: int, *, shard: Shard | None = None) -> "Comb":
        """Return the comb of saved `weights` and `line`; raise ValueError if they are not those of `num_classes`."""
        saved_vector("weights", weights, torch.float64, num_classes, low=CERTAIN)
        certain = (weights < 0).nonzero().squeeze(1)
        if len(certain) > k:
            raise ValueError(f"`weights` must be {CERTAIN:g} for at most {k} classes, got {len(certain)}")
        if (bad := (weights < 0) & (weights != CERTAIN)).any():
            raise ValueError(f"`weights` must be {CERTAIN:g} or not negative, {_check.at_first(weights, bad)}")
        order = saved_permutation("line", line, num_classes).long() if len(line) else None
        comb = cls(weights.index_fill(0, certain, 0.0), certain, k, order=order, shard=shard)
        if comb.total and comb.teeth <= 0:
            raise ValueError(f"`weights` must leave a tooth for those above 0, got {k} of {CERTAIN:g} for a k of {k}")
        return comb

    @property
    def teeth(self) -> int:
        """The number of teeth, for the classes that are not certain."""
        # A length, not a number, which would be a constant of a compiled graph.
        return self._tooth.shape[0] if self.shard is None else self._number_of_teeth

    @property
    def num_classes(self) -> int:
        """The number of classes C, those of other processes included."""
        return self.table.num_classes if self.shard is None else self.shard.num_classes

    @property
    def weights(self) -> Tensor:
        """float64 [C]: the weights in force; -1 for classes that are certain, 0 for those never drawn."""
        return self.table.masses().index_fill_(0, self.certain, CERTAIN)

    @property
    def line(self) -> Tensor:
        """int32 or int64 [C]: the ids in the order of the line; [0]: by id."""
        return self.table.line

    @property
    def numbers(self) -> Tensor:
        """float64 [2]: the spacing of the teeth, 0 if there are none, and the number of certain classes."""
        return self._spacing[0]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.table.device

    def to(self, device: torch.device) -> "Comb":
        """Return the same comb on a device."""
        moved = copy.copy(self)
        moved.table, moved.certain = self.table.to(device), self.certain.to(device)
        for name in ("_tooth", "_unit", "_spacing", "_total"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def arranged(self, order: Tensor) -> "Comb":
        """Return the same design with the classes in another order."""
        return Comb(self.table.masses(), self.certain, self.k, order=order)

    def draw(self, groups: int, *, stratified: bool, generator: torch.Generator | None) -> tuple[Block, ...]:
        """Return the classes under the teeth, and the certain ones in front of them."""
        offsets = self.teeth if stratified else 1
        if self.shard is not None:
            offset = self.shard.uniform(groups, offsets, device=self.device, generator=generator)
            return put_in_front(self.certain + self.shard.first, self._own_part(offset, self.shard))
        offset = torch.rand(groups, offsets, dtype=torch.float64, device=self.device, generator=generator)
        if groups == 1 and not stratified and cpu.is_available(offset):
            return (Block(*cpu.comb(self.table.cpu_table(), offset, self.spacing, self.teeth, self.certain)),)
        if runs_triton(offset):
            from manyclass.kernels.triton import comb as gpu

            # Classes that are certain are in one block with the others if the whole batch shares them.
            shared = groups == 1
            certain, spacing = (self.certain, self.numbers) if shared else (self.certain[:0], self._spacing[1])
            block = Block(*gpu.comb(self.table.gpu_table(), offset, spacing, len(certain) + self.teeth, certain))
            return (block,) if groups == 1 else put_in_front(self.certain, block)
        ids, mass = self.table.locate((offset + self._tooth).mul_(self._unit))
        return put_in_front(self.certain, Block(ids, self._log_spacing() - mass.log_()))

    def _own_part(self, offset: Tensor, shard: Shard) -> Block:
        """Return the classes under the teeth that fall on the part of this process, in slots for all that may."""
        if len(offset.T) > 1:
            offset = offset[:, self._tooth.long()]
        position = (offset + self._tooth).mul_(self._unit)
        inside = (position >= self.start) & (position < self._end)
        ids, mass = self.table.locate((position - self.start).clamp_(0.0, self.table.total))
        # An empty slot holds a class that another slot has drawn, so that no further row gets a gradient.
        before, number = (position < self.start).sum(1, keepdim=True), inside.sum(1, keepdim=True)
        slot = torch.arange(ids.shape[1], device=ids.device).clamp(min=before, max=before + number - 1).clamp_(min=0)
        log_kappa = (self._log_spacing() - mass.log_()).masked_fill_(~inside, -math.inf)
        return Block(ids.gather(1, slot.clamp_(max=max(ids.shape[1] - 1, 0))) + shard.first, log_kappa)

    def under(self, share: Tensor, teeth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes [G, K] at shares of the line, and their log κ if it has a given number of teeth.

        Args:
            share: float64 [G, K]; outside [0, 1) the slot is empty, log κ = -inf.
            teeth: float64 [G, 1], at most those of the comb.
        """
        ids, mass = self.table.locate(share.clamp(0.0, 1.0) * self._total)
        return ids, ((self._total / teeth).log() - mass.log_()).masked_fill_((share < 0) | (share >= 1), -math.inf)

    def log_kappa(self, ids: Tensor, teeth: Tensor | None = None) -> Tensor:
        """Return log κ of classes, 0 for those that are certain, if the line has a number of teeth; None: its own."""
        held, own = None, ids
        if self.shard is not None:
            held = self.shard.holds(ids)
            own = torch.where(held, ids - self.shard.first, 0)
            if self.shard.size == 0:
                return self.shard.summed(torch.zeros(ids.shape, dtype=torch.float64, device=ids.device))
        mass = self.table.mass(own)
        log_spacing = self._log_spacing() if teeth is None else (self._total / teeth).log()
        log_kappa = torch.where(mass > 0, log_spacing - mass.log(), 0.0)
        if self.shard is None or held is None:
            return log_kappa
        return self.shard.summed(log_kappa.masked_fill(~held, 0.0))

    def _log_spacing(self) -> float | Tensor:
        return self._unit.log() if torch.compiler.is_compiling() else math.log(self.spacing or 1.0)
