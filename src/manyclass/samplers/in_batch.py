"""The targets of a batch as each other's candidates."""

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._sampler import checked_draw, no_learning, no_schedule, no_vectors
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable


class InBatch(nn.Module):
    """The other examples' targets, and k classes drawn with replacement from q ∝ f^power for the whole batch.

    Class c is expected (B - 1) f(c) times among the other targets and k q(c) times among the drawn classes, so each
    slot stands for κ = 1/((B - 1) f + k q) classes, a target or a drawn one. The target of an example is not among
    its candidates: it is summed explicitly and never corrected as if it had been drawn. With two towers, which compute
    the batch's targets anyway, the first B candidates are free.

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
    attach, advance, observe = no_vectors, no_schedule, no_learning

    def __init__(self, counts: Tensor | ClassCounts, k: int = 0, *, power: float = 1.0) -> None:
        super().__init__()
        self.k = _check.integer("k", k, 0)
        self.source = WeightSource(counts, name="counts")
        self.drawn = WeightSource(counts, power=power, name="counts")
        self.frequency, self.proposal = (MassTable(source.read()) for source in (self.source, self.drawn))

    num_classes = property(lambda self: self.frequency.num_classes)
    device = property(lambda self: self.frequency.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        ids = target
        if self.k:
            uniform = torch.rand(self.k, dtype=torch.float64, device=target.device, generator=generator)
            ids = torch.cat([target, self.proposal.locate(uniform * self.proposal.total)[0]])
        batch = len(target)
        block = Block(ids.unsqueeze(0), self._log_kappa(ids, batch).unsqueeze(0))
        return Candidates((block,), exclude, lambda: self._log_kappa(target, batch), self.num_classes)

    def _log_kappa(self, ids: Tensor, batch: int) -> Tensor:
        # In a batch of one the only slot is excluded, so any finite κ will do.
        expected = self.frequency.mass(ids) * (max(batch - 1, 1) / self.frequency.total)
        if self.k:
            expected += self.proposal.mass(ids) * (self.k / self.proposal.total)
        return -expected.log()

    def refresh(self) -> None:
        """Rebuild the tables from the counts."""
        for source, table in ((self.source, self.frequency), (self.drawn, self.proposal)):
            table.rebuild(source.read().to(table.device), name="counts")

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        # Both sources read the same counts; the second finds them resized.
        self.source.resize(num_classes)
        self.drawn.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, power={self.drawn.power:g}"
