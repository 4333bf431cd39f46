"""The targets of a batch as each other's candidates."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._sampler import always_settled, checked_draw, no_learning, no_schedule, no_vectors
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable


class InBatch(nn.Module):
    """The other examples' targets, and k classes drawn with replacement from q ∝ f^power for the whole batch.

    Class c is expected (B - 1) f(c) times among the other targets and k q(c) times among the drawn classes, so each
    slot stands for κ = 1/((B - 1) f + k q) classes, a target or a drawn one. The target of an example is not among
    its candidates: it is summed explicitly and never corrected as if it had been drawn. With two towers, which compute
    the batch's targets anyway, the first B candidates are free: a `ScorerHead` encodes each target once.

    `unbiased` is False: Z̃ is right only if the targets are drawn independently with the frequencies of the counts. Use
    streaming counts (`counts.update(target)`, then `refresh()`) if those frequencies change.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes drawn in addition to the targets.
        power: exponent of the counts for those; 0 is uniform.

    Raises:
        TypeError: `counts` is neither a Tensor nor ClassCounts.
        ValueError: a count is negative, infinite or NaN, or, when drawing, 0.

    Example:
        >>> sampler = InBatch(torch.tensor([2.0, 1.0, 1.0]))
        >>> candidates = sampler(torch.tensor([0, 2, 0]))
        >>> candidates.ids()[0], candidates.log_kappa()[0].exp()
        (tensor([0, 2, 0]), tensor([1., 2., 1.], dtype=torch.float64))
    """

    unbiased = False
    renormalises = False
    learns = False
    draws_targets = True
    attach, advance, observe = no_vectors, no_schedule, no_learning
    saved = ("frequency", "proposal")
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(self, counts: Tensor | ClassCounts, k: int = 0, *, power: float = 1.0) -> None:
        super().__init__()
        self.k = _check.integer("k", k, 0)
        self.power = _check.number("power", power)
        self.source = WeightSource(counts, name="counts")
        self._frequency, self._proposal = self._tables()

    def _tables(self) -> tuple[MassTable, MassTable]:
        first = MassTable(self.source.read(), name="counts")
        return first, first if self.power == 1 else MassTable(self.source.read(self.power), name="counts")

    @property
    def frequency(self) -> Tensor:
        """float64 [C]: the counts in force, on any scale."""
        return self._frequency.masses()

    @property
    def proposal(self) -> Tensor:
        """float64 [C]: the weights in force of the drawn classes, on any scale."""
        return self._proposal.masses()

    def move(self, device: torch.device) -> None:
        """Move the tables to a device."""
        self._frequency, self._proposal = self._frequency.to(device), self._proposal.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the tables from saved weights."""
        for name in self.saved:
            value = saved_vector(name, state[name], torch.float64, self.num_classes)
            if not value.any() or (self.source.weights.smoothing != 0 and not value.all()):
                raise ValueError(f"`{name}` must be above 0, {_check.at_first(value, value == 0)}")
        self._frequency, self._proposal = (MassTable(state[name], name=name) for name in self.saved)

    num_classes = property(lambda self: self._frequency.num_classes)
    device = property(lambda self: self._frequency.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments. A target of -1 is that of an ignored example: its slot is empty."""
        self.source.check_every_class_drawn()
        present = target >= 0
        target = torch.where(present, target, target.amax().clamp(min=0))
        ids = target
        if self.k:
            uniform = torch.rand(self.k, dtype=torch.float64, device=target.device, generator=generator)
            ids = torch.cat([target, self._proposal.locate(uniform * self._proposal.total)[0]])
        # In a batch of one the only slot is excluded, so any finite κ will do.
        others = (present.sum() - 1).clamp(min=1).double()
        log_kappa = self._log_kappa(ids, others).masked_fill(F.pad(~present, (0, self.k)), -math.inf)
        block = Block(ids.unsqueeze(0), log_kappa.unsqueeze(0), has_targets=True)
        return Candidates((block,), exclude, lambda: self._log_kappa(target, others), self.num_classes)

    def _log_kappa(self, ids: Tensor, others: Tensor) -> Tensor:
        """Return log κ of classes in a batch with this number of other targets."""
        expected = self._frequency.mass(ids) * (others / self._frequency.total)
        if self.k:
            expected += self._proposal.mass(ids) * (self.k / self._proposal.total)
        return -expected.log()

    is_settled = always_settled

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the tables, which a recorded draw reads."""
        return self._frequency, self._proposal, self.k

    def refresh(self) -> None:
        """Rebuild the tables from the counts."""
        device = self.device
        self._frequency, self._proposal = (table.to(device) for table in self._tables())

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, power={self.power:g}"
