"""Systematic sampling with inclusion probabilities learned from the model."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from manyclass import _check, _ranks
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._inclusion import split_certain
from manyclass.samplers._rebuild import BackgroundRebuild
from manyclass.samplers._sampler import Observation, checked_draw
from manyclass.samplers._table import MassTable
from manyclass.samplers.systematic import Systematic


class Learned(nn.Module):
    """`Systematic` with π ∝ a running estimate of each class's root-mean-square probability, plus its frequency.

    The relative variance of Z̃ is Σ (1/π - 1) p², so the best π for a whole batch is proportional to the root mean
    square of p over its examples; frequencies, the mean of p, only resemble it. When a class has been scored, the head
    reports its mean square over the batch (0 where it is the target), and the estimate moves towards it by the factor
    min(1, forget / π): rare draws move it further, so that on average all classes forget at the same rate. The
    frequencies keep every π above 0. Nothing is learned in a compiled head, or with an objective that has no Z̃.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes drawn, at most C.
        forget: the share of the estimate that a step replaces.
        mix: the factor of the frequencies, which are added to the normalised estimate.
        every: steps between two rebuilds of the table on a background thread; each is used a quarter as many steps
            later. Default: the larger of 50 and √C.
        order: the order of the classes on the line, as for `Systematic`.

    Raises:
        ValueError: k is above C; another number is out of range; a count is negative, infinite or NaN.

    Example:
        >>> from manyclass import ClassHead
        >>> head = ClassHead(8, 500, sampler=Learned(torch.ones(500), k=50))
        >>> head(torch.randn(16, 8), torch.arange(16)).backward()
    """

    unbiased = True
    renormalises = False
    learns = True
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
        self._every = None if every is None else _check.integer("every", every, 1)
        self.sampler = Systematic(self.counts.frequency(), k, order=order)
        # Floats are stored as int64 bits: `.half()` and `.to(dtype)` convert every floating-point buffer.
        self.register_buffer("_estimate_bits", self.counts.frequency().square_().view(torch.int64))
        self.schedule: BackgroundRebuild[MassTable] = BackgroundRebuild()

    @property
    def estimate(self) -> Tensor:
        """float64 [C]: the estimated mean square of each class's probability."""
        return self._estimate_bits.view(torch.float64)

    @property
    def k(self) -> int:
        """The number of classes drawn."""
        return self.sampler.k

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Order classes by these vectors [C, D], if the order is "cluster"."""
        self.sampler.attach(weight, bias)

    def advance(self) -> None:
        """Count a training step for the order of the classes; `observe` counts it for the table."""
        self.sampler.advance()

    num_classes = property(lambda self: self.sampler.num_classes)
    device = property(lambda self: self.sampler.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        return self.sampler.draw(target, exclude, hidden=hidden, generator=generator)

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Move the estimates of the classes drawn, by every rank in turn, and rebuild the table if that is due."""
        (block,) = observation.candidates.blocks
        for drawn in _ranks.from_ranks(block.ids[0], block.log_kappa[0], observation.probability()):
            self._learn(*drawn)
        table = self.schedule.advance(self.sampler.table, self.every, self._snapshot)
        if table is not self.sampler.table:
            self.sampler.use_table(table)

    def _learn(self, ids: Tensor, log_kappa: Tensor, probability: Tensor) -> None:
        """Move the estimates of the classes of one draw [K]."""
        # κ = 1/π, and 0 for a slot that a wrapper has emptied. The draw is without replacement: no class twice.
        kappa = log_kappa.exp()
        rate = (self.forget * kappa).clamp_(max=1.0)
        known = self.estimate[ids]
        change = rate * (probability.to(known).square() - known)
        self.estimate[ids] = known + torch.where(kappa > 0, change, 0.0)

    def _snapshot(self) -> Callable[[], MassTable]:
        """Copy the inputs of a build, and return the function that builds a table from them."""
        estimate, frequency, k = self.estimate.clone(), self.counts.frequency(), self.k
        order, current = self.sampler.order, self.sampler.table.order
        left_out = self.sampler.source.left_out

        def build() -> MassTable:
            weight = self._weight(estimate, frequency)
            if left_out is not None:
                weight[left_out.to(weight.device)] = 0.0
            arranged = current
            # Only this order depends on the weights.
            if order is not None and current is not None and order.rule == "frequency":
                arranged = order.sort(weight, current)
            return MassTable(split_certain(weight, k)[0], order=arranged)

        return build

    def _weight(self, estimate: Tensor, frequency: Tensor) -> Tensor:
        learnt = estimate.sqrt()
        return learnt.div_(learnt.sum()).add_(frequency.to(learnt.device), alpha=self.mix)

    @property
    def every(self) -> int:
        """The steps between two rebuilds of the table."""
        return self._every or max(50, math.isqrt(self.num_classes))

    def without(self, ids: Tensor) -> "Learned":
        """Return the same design over all classes but these, which are summed elsewhere."""
        rest = Learned(self.counts, self.k, forget=self.forget, mix=self.mix, every=self._every)
        rest.sampler, rest._estimate_bits = self.sampler.without(ids), self._estimate_bits.clone()
        return rest

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self.sampler.heaviest(n)

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.sampler.k = _check.integer("k", k, 1, self.num_classes)
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the table from the estimate and the counts."""
        self.schedule.drop()
        self.sampler.source.weights = self._weight(self.estimate, self.counts.frequency())
        self.sampler.refresh()

    def resize(self, num_classes: int) -> None:
        """Resize the counts; the estimates of new classes start from their frequencies."""
        _check.integer("num_classes", num_classes, self.k)
        self.counts.resize(num_classes)
        estimate = self.counts.frequency().square_().to(self.device)
        kept = min(num_classes, self.num_classes)
        estimate[:kept] = self.estimate[:kept]
        self._estimate_bits = estimate.view(torch.int64)
        source = self.sampler.source
        if source.left_out is not None:
            source.left_out = source.left_out[source.left_out < num_classes]
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"forget={self.forget:g}, mix={self.mix:g}"
