"""Systematic sampling whose inclusion probabilities are learnt from the model."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._inclusion import split_certain
from manyclass.samplers._renewal import Renewal
from manyclass.samplers._sampler import Upkeep, checked_draw
from manyclass.samplers._table import MassTable
from manyclass.samplers.systematic import Systematic


class Learned(nn.Module):
    """`Systematic` with π ∝ a running estimate of each class's root-mean-square probability, and some of its frequency.

    The variance of Z̃ over Z is Σ (1/π - 1) p², so the best π for a whole batch is as the root of the mean square of p
    over its examples, which frequencies, the mean of p, only resemble. Whenever a class has been scored, a head tells
    its mean square over the batch (in examples that it is not the target of), and the estimate moves towards it by
    min(1, forget / π): rare draws move it further, so that on average every class forgets as fast. The frequencies'
    part keeps every π above 0. Objectives that have no Z̃ teach it nothing; then it is `Systematic`.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes drawn, at most C.
        forget: the share of the estimate that a step replaces.
        mix: how much of the frequencies is in the weights.
        every: steps between two rebuildings of the table, on a thread; each is taken up a quarter as many steps later.
            Default: 50, or √C where that is more.
        order: how classes lie on the line that is drawn from; as of `Systematic`.

    Raises:
        ValueError: k above C; numbers out of range; counts negative, infinite or NaN.

    Example:
        >>> from manyclass import ClassHead
        >>> head = ClassHead(8, 500, sampler=Learned(torch.ones(500), k=50))
        >>> head(torch.randn(16, 8), torch.arange(16)).backward()
    """

    unbiased = True
    renormalises = False
    _estimate_bits: Tensor

    def __init__(
        self,
        counts: Tensor | ClassCounts,
        k: int,
        *,
        forget: float = 0.005,
        mix: float = 0.5,
        every: int | None = None,
        order: str | Tensor | None = None,
    ) -> None:
        super().__init__()
        self.counts = counts if isinstance(counts, ClassCounts) else ClassCounts(counts)
        self.forget = _check.number("forget", forget, low=0, strict=True)
        self.mix = _check.number("mix", mix, low=0, strict=True)
        self._every = None if every is None else _check.whole("every", every, 1)
        self.sampler = Systematic(self.counts.frequency(), k, order=order)
        # As int64 the bits are safe from `.half()` and `.to(dtype)`, which convert every floating buffer of a model.
        self.register_buffer("_estimate_bits", self.counts.frequency().square_().view(torch.int64))
        self.renewal: Renewal[MassTable] = Renewal()

    @property
    def estimate(self) -> Tensor:
        """float64 [C]: the mean square of each class's probability, as far as it is known."""
        return self._estimate_bits.view(torch.float64)

    @property
    def k(self) -> int:
        return self.sampler.k

    def follow(self, vectors: Tensor, bias: Tensor | None = None) -> None:
        """Order classes by these vectors [C, D], if the order is "cluster"."""
        self.sampler.follow(vectors, bias)

    @property
    def num_classes(self) -> int:
        return self.sampler.num_classes

    @property
    def device(self) -> torch.device:
        return self.sampler.device

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """As a call, for arguments that have been checked."""
        return self.sampler.draw(target, exclude, hidden=hidden, generator=generator)

    @torch.no_grad()
    def observe(self, candidates: Candidates, p: Tensor) -> None:
        """Learn from a draw: p [K] is the root of the mean over the batch of (u/Z̃)² of each slot."""
        (block,) = candidates.blocks
        ids, kappa = block.ids[0], block.log_kappa[0].exp()
        # κ = 1/π; a draw without replacement has no class twice.
        rate = (self.forget * kappa).clamp_(max=1.0)
        known = self.estimate[ids]
        self.estimate[ids] = known + rate * (p.to(known).square_() - known)
        table = self.renewal.step(self.sampler.table, self.every, self._snapshot)
        if table is not self.sampler.table:
            self.sampler.take(table)

    def _snapshot(self) -> Callable[[], MassTable]:
        """What a table follows from, copied, and how it does."""
        estimate, frequency, k = self.estimate.clone(), self.counts.frequency(), self.k
        order, present = self.sampler.order, self.sampler.table.order

        def build() -> MassTable:
            weight = self._weight(estimate, frequency)
            arranged = present
            # The only order that is another one for other weights.
            if order is not None and present is not None and order.how == "frequency":
                arranged = order.arrange(weight, present)
            return MassTable(split_certain(weight, k)[0], order=arranged)

        return build

    def _weight(self, estimate: Tensor, frequency: Tensor) -> Tensor:
        learnt = estimate.sqrt()
        return learnt.div_(learnt.sum()).add_(frequency.to(learnt.device), alpha=self.mix)

    @property
    def every(self) -> int:
        """Steps between two rebuildings of the table."""
        return self._every or max(50, math.isqrt(self.num_classes))

    def upkeep(self) -> Iterator[Upkeep]:
        """What is done now and then, and how often."""
        yield Upkeep(self.refresh, self.every)
        yield from self.sampler.upkeep()

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.sampler.k = _check.whole("k", k, 1, self.num_classes)
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the table from the estimate and the counts."""
        self.renewal.drop()
        self.sampler.source.weights = self._weight(self.estimate, self.counts.frequency())
        self.sampler.refresh()

    def resize(self, num_classes: int) -> None:
        """Follow the counts to another number of classes; new ones start at their frequency."""
        _check.whole("num_classes", num_classes, self.k)
        self.counts.resize(num_classes)
        estimate = self.counts.frequency().square_().to(self.device)
        kept = min(num_classes, self.num_classes)
        estimate[:kept] = self.estimate[:kept]
        self._estimate_bits = estimate.view(torch.int64)
        self.refresh()

    def extra_repr(self) -> str:
        return f"forget={self.forget:g}, mix={self.mix:g}"
