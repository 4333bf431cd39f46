"""Bernoulli sampling: an independent coin for each class, tossed without a pass over all coins."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass.candidates import Block, Candidates, join
from manyclass.counts import ClassCounts, exponent
from manyclass.samplers._inclusion import inclusion_probabilities
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

OVERFLOW_PROBABILITY = 1e-12
MAX_RATE = math.log(2.0) * (1 + 1e-9)


class Bernoulli(nn.Module):
    """A sample that keeps each class independently with probability b = f^α, α solved for Σ b = k; κ = 1/b.

    On a line where each class is -log(1 - b) long, the points of a Poisson process of rate 1 miss a class with
    probability 1 - b, independently of the others. So the classes that are hit are the Bernoulli sample, at a cost
    of O(k). Their number is random; there are slots for all of them with probability 1 - 1e-12. Classes of b > 1/2,
    at most 2k, are drawn by a uniform number each.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes kept on average, at most C.
        group_size: the number of examples that share a draw; None: the whole batch.

    Raises:
        ValueError: k exceeds the number of classes that occur and smoothing is off, so no α exists; a count is
            negative, infinite or NaN, or, when drawing, 0 for a class that is not explicit.

    Example:
        >>> sampler = Bernoulli(torch.ones(100), k=20)
        >>> candidates = sampler(torch.tensor([3]), generator=torch.Generator().manual_seed(0))
        >>> candidates.log_kappa().exp().round().unique()
        tensor([0., 5.], dtype=torch.float64)
    """

    unbiased = True
    renormalises = False
    learns = False
    attach, advance, observe = no_vectors, no_schedule, no_learning
    saved = ("rates", "likely_b")
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(self, counts: Tensor | ClassCounts | WeightSource, k: int, *, group_size: int | None = None) -> None:
        super().__init__()
        source = counts if isinstance(counts, WeightSource) else WeightSource(counts, name="counts")
        self._set_up(source, _check.integer("k", k, 1, source.num_classes), group_size)

    @classmethod
    def proportional(
        cls, weights: Tensor | ClassCounts | WeightSource, k: int, *, group_size: int | None = None
    ) -> "Bernoulli":
        """Keep classes with probabilities proportional to size: b = min(1, a·weight), a solved for Σ b = k.

        Args:
            weights: C positive numbers or ClassCounts.
            k: classes kept on average, at most C.
            group_size: the number of examples that share a draw; None: the whole batch.

        Raises:
            ValueError: k is above C; a weight is negative, infinite or NaN, or, when drawing, 0 for a class that is
                not explicit.

        Example:
            >>> sampler = Bernoulli.proportional(torch.tensor([9.0, 1.0, 1.0, 1.0]), k=2)
            >>> sampler(torch.arange(4)).target_log_kappa().exp().round()
            tensor([1., 3., 3., 3.], dtype=torch.float64)
        """
        source = weights if isinstance(weights, WeightSource) else WeightSource(weights)
        return cls._of(source, _check.integer("k", k, 1, source.num_classes), group_size, proportional=True)

    @classmethod
    def from_probabilities(cls, probabilities: Tensor | WeightSource, *, group_size: int | None = None) -> "Bernoulli":
        """Keep class c with probability probabilities[c], any numbers in (0, 1].

        Raises:
            ValueError: a probability is above 1, negative or NaN, or, when drawing, 0 for a class that is not explicit.
        """
        if isinstance(probabilities, WeightSource):
            source = probabilities
        else:
            source = WeightSource(probabilities, name="probabilities", smooth=False)
            above = source.read() > 1
            if above.any():
                raise ValueError(f"`probabilities` must be at most 1, {_check.at_first(probabilities, above)}")
        return cls._of(source, None, group_size)

    @classmethod
    def _of(
        cls, source: WeightSource, k: int | None, group_size: int | None, *, proportional: bool = False
    ) -> "Bernoulli":
        sampler = cls.__new__(cls)
        nn.Module.__init__(sampler)
        sampler._set_up(source, k, group_size, proportional=proportional)
        return sampler

    def _set_up(
        self, source: WeightSource, k: int | None, group_size: int | None, *, proportional: bool = False
    ) -> None:
        self.source = source
        self.k = k
        self._proportional = proportional
        self.group_size = check_group_size(group_size)
        self._use(*self._split())

    def _use(self, rate: Tensor, likely: Tensor, likely_b: Tensor) -> None:
        # Ids int64 [n] of the classes of b > 1/2, and their b, float64 [n].
        self._likely, self._likely_b = likely, likely_b
        self.table = MassTable(rate, name=self.source.name)
        self._points = capacity(self.table.total)

    @property
    def rates(self) -> Tensor:
        """float64 [C]: -log(1 - b) of the classes of b ≤ 1/2 in force, 0 for the others."""
        return self.table.masses()

    @property
    def likely_b(self) -> Tensor:
        """float64 [C]: the probabilities of the classes of b > 1/2 in force, 0 for the others."""
        return torch.zeros_like(self.rates).index_copy_(0, self._likely, self._likely_b)

    def move(self, device: torch.device) -> None:
        """Move the tables to a device."""
        self.table, self._likely = self.table.to(device), self._likely.to(device)
        self._likely_b = self._likely_b.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the tables from saved probabilities."""
        rates = saved_vector("rates", state["rates"], torch.float64, self.num_classes)
        likely_b = saved_vector("likely_b", state["likely_b"], torch.float64, self.num_classes)
        likely = likely_b.nonzero().squeeze(1)
        likely_b = likely_b[likely]
        if (rates > MAX_RATE).any() or rates[likely].any() or not ((likely_b > 0.5) & (likely_b <= 1)).all():
            raise ValueError("`rates` must be those of b ≤ 1/2, and `likely_b` in (1/2, 1], got others")
        most = self._expected(self.table.masses(), self._likely_b) if self.k is None else self.k
        if (expected := self._expected(rates, likely_b)) > most * (1 + 1e-6):
            raise ValueError(f"`rates` must keep at most {most:g} classes on average, got {expected:g}")
        self.source.restore_left_out(rates.index_fill(0, likely, 1.0))
        self._use(rates, likely, likely_b)

    @staticmethod
    def _expected(rates: Tensor, likely_b: Tensor) -> float:
        return float(-torch.expm1(-rates).sum() + likely_b.sum())

    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return -log(1 - b) of the classes of b ≤ 1/2 (0 for the others), the ids of the others and their b."""
        b = self.source.read()
        if self.k is not None and self._proportional:
            b = inclusion_probabilities(b, self.k)
        # If an explicit set holds every class, there is nothing to solve for.
        elif self.k is not None and b.any():
            alpha = exponent(b.div_(float(b.sum())), min(self.k, int((b > 0).sum())))
            b = torch.where(b > 0, b.pow_(alpha), 0.0)
        likely = (b > 0.5).nonzero().squeeze(1)
        likely_b = b[likely]
        b[likely] = 0.0
        return b.neg_().log1p_().neg_(), likely, likely_b

    num_classes = property(lambda self: self.table.num_classes)
    device = property(lambda self: self.table.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        groups = num_groups(target, self.group_size)
        blocks = []
        if len(self._likely):
            b = self._likely_b
            coin = torch.rand(groups, len(b), dtype=torch.float64, device=b.device, generator=generator)
            log_kappa = torch.where(coin < b, -b.log(), -math.inf)
            blocks.append(Block(self._likely.expand(groups, -1), log_kappa))
        if self._points:
            uniform = torch.rand(groups, self._points, dtype=torch.float64, device=target.device, generator=generator)
            # Exponential gaps, -log(1 - u); torch's own exponential_ takes twice as long.
            point = uniform.neg_().log1p_().cumsum(1).neg_()
            ids, rate = self.table.locate(point.clamp(max=self.table.total))
            # -log b = -log(1 - exp(-λ)) in the fewest passes over memory.
            log_kappa = rate - rate.expm1().log_()
            # Points beyond the line are empty slots. Points ascend, so a second hit of a class follows its first.
            log_kappa.masked_fill_(point >= self.table.total, -math.inf)
            log_kappa[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -math.inf)
            blocks.append(Block(ids, log_kappa))
        return Candidates(join(*blocks), exclude, lambda: self._log_kappa(target), self.num_classes)

    def _log_kappa(self, ids: Tensor) -> Tensor:
        b = -torch.expm1(-self.table.mass(ids))
        if len(self._likely):
            place = torch.searchsorted(self._likely, ids).clamp_(max=len(self._likely) - 1)
            b = torch.where(self._likely[place] == ids, self._likely_b[place], b)
        return -b.log()

    is_settled = always_settled

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the tables, which a recorded draw reads."""
        return self.table, self._likely, self._likely_b

    def without(self, ids: Tensor) -> "Bernoulli":
        """Return the same design over all classes but these, which are summed elsewhere."""
        return Bernoulli._of(self.source.without(ids), self.k, self.group_size, proportional=self._proportional)

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self.source.heaviest(n).to(self.device)

    def set_k(self, k: int) -> None:
        """Keep another number of classes on average; raise ValueError if the sampler was built from probabilities."""
        if self.k is None:
            raise ValueError(f"`k` must not be set for a sampler built from probabilities, got {k}")
        self.k = _check.integer("k", k, 1, self.num_classes)
        self.refresh()

    def refresh(self) -> None:
        """Solve for the probabilities again and rebuild the table from the counts."""
        device = self.device
        self._use(*(x.to(device) for x in self._split()))

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        _check.integer("num_classes", num_classes, self.k or 1)
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, group_size={self.group_size}"


def capacity(mean: float) -> int:
    """Return a number of points that a Poisson process of this mean exceeds with probability below 1e-12.

    Chernoff: P(N ≥ n) ≤ exp(n - mean - n log(n / mean)).
    """
    if mean == 0:
        return 0
    n = math.ceil(mean)
    while n * math.log(n / mean) - n + mean < -math.log(OVERFLOW_PROBABILITY):
        n += 1 + int(math.sqrt(mean) / 16)
    return n
