"""Systematic draws from inclusion probabilities that are made at each step: no tables, static shapes, no sync.

Inclusion probabilities and the random offset are multiples of a power of two, the quantum, small enough to be exact and
large enough that every sum of them is exact in float64. So the place of a class on the line does not depend on the
order of summation, its inclusion probability is exactly its π, and a class of π = 1 is drawn exactly once.
"""

import math

import torch
from torch import Tensor

from manyclass._shard import Shard

# Newton's method finds the scale in 3 to 8 steps. After fewer, π sums to less than k, which costs slots, never bias.
NEWTON_STEPS = 8
MANTISSA_BITS = 52


class Teeth:
    """A comb of k teeth of unit spacing. It never changes.

    Args:
        k: the number of teeth.
        num_drawn: the number of classes of positive weight.
        device: the device of its tensors.
        shard: the classes of this process, if the line is divided among processes; None: all.
    """

    def __init__(self, k: int, num_drawn: int, device: torch.device, shard: Shard | None = None) -> None:
        self._shard = shard
        # Tensors, since numbers would be constants of a compiled graph, which every other k would compile again.
        self._number = torch.arange(k, dtype=torch.float64, device=device)
        quantum = math.ldexp(1.0, k.bit_length() - MANTISSA_BITS)
        self._quantum = torch.tensor(quantum, dtype=torch.float64, device=device)
        # Rounded up to one quantum, the rarest classes take at most this much more.
        self._rounding = torch.tensor(num_drawn * quantum, dtype=torch.float64, device=device)
        self.k = torch.tensor(float(k), dtype=torch.float64, device=device)
        self._takes_all = k >= num_drawn

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self._number.device

    def inclusion(self, weight: Tensor, length: Tensor | None = None) -> Tensor:
        """Return π = min(1, a·weight) [G, N] in multiples of the quantum, with a solved for Σ π ≤ length.

        Args:
            weight: float64 [G, N], finite and not negative. A row of 0 has π = 0.
            length: float64 [G, 1], at most k; None: k.
        """
        drawn = weight > 0
        if length is None and self._takes_all:
            return drawn.double()
        goal = (self.k if length is None else length) - self._rounding
        scale = goal / self._sum(weight)[0]
        for _ in range(NEWTON_STEPS):
            certain = weight * scale >= 1
            rest, number = self._sum(weight.masked_fill(certain, 0.0), certain)
            # Each step adds classes to the certain ones and scales the others up. If none is left, the scale stays.
            scale = torch.where(rest > 0, (goal - number) / rest, scale)
        multiple = (weight * (scale / self._quantum)).floor_().clamp_(min=1.0)
        return (multiple * self._quantum).clamp_(max=1.0).masked_fill_(~drawn, 0.0)

    def _sum(self, *values: Tensor) -> Tensor:
        """Return the sums of values [G, N] over all classes, float64 [n, G, 1]."""
        sums = torch.stack([value.sum(1, keepdim=True, dtype=torch.float64) for value in values])
        return sums if self._shard is None else self._shard.summed(sums)

    def draw(self, pi: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the places [G, k] under the teeth and their log κ = -log π; -inf for teeth beyond the end of the line.

        Args:
            pi: [G, N] from `inclusion`.
            generator: for the offsets, one for each row.
        """
        position = self.positions(len(pi), generator)
        if self._shard is None:
            return under(position, pi)
        # Sums of π are exact, so every tooth falls on the part of one process.
        length = pi.sum(1)
        ends = self._shard.stacked(length).cumsum(0)[self._shard.rank].unsqueeze(1)
        start = ends - length.unsqueeze(1)
        inside = (position >= start) & (position < ends)
        # The length of a part depends on the batch. Where reading it is free, it gets no more slots than it needs.
        slots = position.shape[1] if inside.is_cuda else int(inside.sum(1).amax())
        slots = 0 if pi.shape[1] == 0 else slots
        tooth = (position < start).sum(1, keepdim=True) + torch.arange(slots, device=position.device)
        if slots == 0:
            return tooth, tooth.to(position)
        place = tooth.clamp(max=position.shape[1] - 1)
        position, inside = position.gather(1, place), inside.gather(1, place) & (place == tooth)
        # An empty slot holds the last class that was drawn, so that no further row gets a gradient.
        last = position.masked_fill(~inside, -math.inf).amax(1, keepdim=True).clamp(min=0.0)
        place, log_kappa = under(torch.where(inside, position - start, last - start).clamp_(min=0.0), pi)
        return place, log_kappa.masked_fill_(~inside, -math.inf)

    def positions(self, groups: int, generator: torch.Generator | None) -> Tensor:
        """Return the positions of the teeth, float64 [G, k], with a random offset for each group."""
        if self._shard is None:
            offset = torch.rand(groups, 1, dtype=torch.float64, device=self.device, generator=generator)
        else:
            offset = self._shard.uniform(groups, 1, device=self.device, generator=generator)
        return (offset / self._quantum).floor_().mul_(self._quantum) + self._number


def under(position: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places [G, k] at positions [G, k] of a line of π [G, N], and log κ = -log π; -inf beyond the line."""
    length = pi.shape[1]
    place = torch.searchsorted(pi.cumsum(1), position, right=True)
    log_kappa = -pi.gather(1, place.clamp(max=length - 1)).log()
    return place.clamp(max=length - 1), log_kappa.masked_fill_(place >= length, -math.inf)
