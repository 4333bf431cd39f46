"""Importance sampling: k independent draws from q, with replacement."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._sampler import check_group_size, checked_draw, no_learning, no_schedule, no_vectors, num_groups
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable


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
    saved = ("weights",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self, weights: Tensor | ClassCounts | WeightSource, k: int, *, power: float = 1.0, group_size: int | None = None
    ) -> None:
        super().__init__()
        self.k = _check.integer("k", k, 1)
        self.group_size = check_group_size(group_size)
        self.source = weights if isinstance(weights, WeightSource) else WeightSource(weights, power=power)
        self.table = MassTable(self.source.read())

    @property
    def weights(self) -> Tensor:
        """float64 [C]: the weights in force, on any scale."""
        return self.table.masses()

    def move(self, device: torch.device) -> None:
        """Move the table to a device."""
        self.table = self.table.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the table from saved weights."""
        table = MassTable(saved_vector("weights", state["weights"], torch.float64, self.num_classes))
        self.source.restore_left_out(state["weights"])
        self.table = table

    def set_weights(self, weights: Tensor) -> None:
        """Draw with these weights, float64 [C], until the next `refresh()`."""
        self.table = MassTable(weights)

    @property
    def renormalises(self) -> bool:
        """True if it draws from the complement of the excluded classes."""
        return self.group_size == 1

    num_classes = property(lambda self: self.table.num_classes)
    device = property(lambda self: self.table.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        groups = num_groups(target, self.group_size)
        # If an explicit set holds every class, there is nothing to draw.
        k = self.k if self.table.total else 0
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
        return self.source.heaviest(n)

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.k = _check.integer("k", k, 1)

    def refresh(self) -> None:
        """Rebuild the table from the counts."""
        self.table = MassTable(self.source.read().to(self.device))

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, group_size={self.group_size}"
