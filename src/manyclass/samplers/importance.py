"""Importance sampling: k independent draws from q, with replacement."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass._shard import Shard
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._sampler import (
    always_settled,
    check_group_size,
    checked_draw,
    no_learning,
    no_schedule,
    no_vectors,
    num_groups,
)
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable
from manyclass.samplers.bernoulli import capacity


class Importance(nn.Module):
    """k draws with replacement from q ∝ weights^power, each standing for κ = 1/(k q) classes.

    Draws of an excluded class become empty slots; the estimate stays unbiased. With `group_size=1` each example draws
    from the complement of its excluded classes, q renormalised over it, as the paper does, so no draw is lost.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes drawn.
        power: exponent of the weights; 0 is uniform.
        group_size: the number of examples that share a draw; None: the whole batch.

    Raises:
        ValueError: a weight is negative, infinite or NaN, or, when drawing, 0 for a class that is not explicit.

    Example:
        >>> sampler = Importance(torch.tensor([1.0, 1.0, 2.0]), k=4)
        >>> candidates = sampler(torch.tensor([0]), generator=torch.Generator().manual_seed(0))
        >>> candidates.ids(), candidates.log_kappa().exp()
        (tensor([[2, 2, 1, 2]]), tensor([[0.5000, 0.5000, 1.0000, 0.5000]], dtype=torch.float64))
    """

    unbiased = True
    learns = False
    attach, advance, observe = no_vectors, no_schedule, no_learning
    saved = by_class = ("weights",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self, weights: Tensor | ClassCounts | WeightSource, k: int, *, power: float = 1.0, group_size: int | None = None
    ) -> None:
        super().__init__()
        self.k = _check.integer("k", k, 1)
        self.group_size = check_group_size(group_size)
        self.source = weights if isinstance(weights, WeightSource) else WeightSource(weights, power=power)
        self._use(MassTable(self.source.read()))

    def _use(self, table: MassTable) -> None:
        self.table = table
        shard, here, lengths = self.source.shard, 0, [table.total]
        if shard is not None:
            here, lengths = shard.rank, shard.numbers(table.total)[:, 0].tolist()
        self._total, self._start = math.fsum(lengths), math.fsum(lengths[:here])
        # Rounding may move a position to the end of the line.
        self._end = self._start + table.total if any(lengths[here + 1 :]) else math.inf

    @property
    def weights(self) -> Tensor:
        """float64 [C]: the weights in force, on any scale."""
        return self.table.masses()

    def move(self, device: torch.device) -> None:
        """Move the table to a device."""
        self.table = self.table.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the table from saved weights."""
        weights = saved_vector("weights", state["weights"], torch.float64, self.table.num_classes)
        table = MassTable(weights, shard=self.source.shard)
        self.source.restore_left_out(state["weights"])
        self._use(table)

    def set_weights(self, weights: Tensor) -> None:
        """Draw with these weights, float64 [C], until the next `refresh()`."""
        self._use(MassTable(weights, shard=self.source.shard))

    is_settled = always_settled

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the table, which a recorded draw reads."""
        return self.table, self.k

    @property
    def renormalises(self) -> bool:
        """True if it draws from the complement of the excluded classes."""
        return self.group_size == 1

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone.

        Raises:
            ValueError: each example draws from the complement of its excluded classes, which may be anywhere.
        """
        if self.renormalises:
            raise ValueError("`group_size` must not be 1 if classes are divided among processes, got 1")
        self.source.divide(shard)
        self.refresh()

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        shard = self.source.shard
        return self.table.num_classes if shard is None else shard.num_classes

    device = property(lambda self: self.table.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        groups = num_groups(target, self.group_size)
        # If an explicit set holds every class, there is nothing to draw.
        k = self.k if self._total else 0
        if self.source.shard is not None:
            return self._own_part(target, exclude, groups, k, generator, self.source.shard)
        uniform = torch.rand(groups, k, dtype=torch.float64, device=target.device, generator=generator)
        if self.renormalises and exclude.shape[1]:
            position, free = self._complement(uniform, exclude)
        else:
            position = uniform * self.table.total
            free = uniform.new_full((1,), self.table.total)
        # The function below may be called after the table has been replaced.
        table = self.table
        ids, mass = table.locate(position)
        log_share = free.log_().sub_(math.log(self.k))
        log_kappa = log_share.unsqueeze(1) - mass.log_()
        return Candidates(
            (Block(ids, log_kappa),),
            exclude,
            # A class that is summed elsewhere has mass 0, so its log κ is infinite.
            lambda: log_share - table.mass(target).log(),
            self.num_classes,
        )

    def _own_part(
        self,
        target: Tensor,
        exclude: Tensor,
        groups: int,
        k: int,
        generator: torch.Generator | None,
        shard: Shard,
    ) -> Candidates:
        """Return the draws that fall on the part of this process, in slots for all with probability 1 - 1e-12."""
        position = shard.uniform(groups, k, device=target.device, generator=generator).mul_(self._total)
        inside = (position >= self._start) & (position < self._end)
        slots = min(k, capacity(k * self.table.total / self._total)) if self.table.total else 0
        first = (~inside).to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
        inside, position = inside.gather(1, first), position.gather(1, first)
        table = self.table
        ids, mass = table.locate((position - self._start).clamp_(0.0, table.total))
        log_share = math.log((self._total or 1.0) / self.k)
        log_kappa = (log_share - mass.log_()).masked_fill_(~inside, -math.inf)

        def target_log_kappa() -> Tensor:
            held = shard.holds(target)
            if shard.size == 0:
                return shard.summed(torch.zeros(target.shape, dtype=torch.float64, device=target.device))
            mass = table.mass(torch.where(held, target - shard.first, 0))
            return shard.summed((log_share - mass.log()).masked_fill(~held, 0.0))

        return Candidates((Block(ids + shard.first, log_kappa),), exclude, target_log_kappa, self.num_classes)

    def _complement(self, uniform: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions [B, k] on the line without the excluded classes, and the length [B] of that line.

        In the order of ids the excluded intervals leave gaps before, between and behind them; repeated ids leave
        gaps of negative length, which count as 0.
        """
        ids = exclude.sort(1).values
        pad = ids < 0
        ids = ids.clamp(min=0)
        start, end = (edge.masked_fill(pad, 0.0) for edge in self.table.interval(ids))
        origin = F.pad(end, (1, 0))
        gaps = (F.pad(start, (0, 1), value=self.table.total) - origin).clamp_(min=0)
        ends = gaps.cumsum(1)
        free = ends[:, -1]
        x = uniform * free.unsqueeze(1)
        gap = torch.searchsorted(ends, x, right=True).clamp_(max=gaps.shape[1] - 1)
        return origin.gather(1, gap) + (x - (ends - gaps).gather(1, gap)), free

    def without(self, ids: Tensor) -> "Importance":
        """Return the same design over all classes but these, which are summed elsewhere."""
        return Importance(self.source.without(ids), self.k, group_size=self.group_size)

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self.source.heaviest(n).to(self.device)

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.k = _check.integer("k", k, 1)

    def refresh(self) -> None:
        """Rebuild the table from the counts."""
        self._use(MassTable(self.source.read().to(self.device), shard=self.source.shard))

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, group_size={self.group_size}"
