"""Bernoulli sampling: an independent coin for each class, tossed without a pass over all coins."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Block, Candidates, join
from manyclass.counts import ClassCounts, exponent
from manyclass.samplers._sampler import check_call, check_group_size, num_groups
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable

_OVERFLOW = 1e-12


class Bernoulli(nn.Module):
    """Keeps each class independently with probability b = f^α, α solved for Σ b = k; κ = 1/b.

    A Poisson number of draws with rates λ = -log(1 - b) leaves each class out with probability exp(-λ) = 1 - b,
    independently of the others. So the set of classes drawn at least once is the Bernoulli sample, at a cost of
    O(k). Its size is random; it is written into a fixed number of slots, too few with probability below 1e-12.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes kept on average, at most C.
        group_size: how many examples share a draw; None: the batch; 1: each its own.

    Raises:
        ValueError: no α exists (more than the classes that occur, without smoothing); counts negative, infinite or
            NaN; when drawing, 0 for a class that is not explicit.

    Example:
        >>> sampler = Bernoulli(torch.tensor([4.0, 4.0, 4.0, 4.0]), k=2)
        >>> candidates = sampler(torch.tensor([3]), generator=torch.Generator().manual_seed(0))
        >>> candidates.log_kappa().exp()
        tensor([[2., 2., 0., 0.]], dtype=torch.float64)
    """

    unbiased = True
    renormalises = False
    _certain: Tensor

    def __init__(self, counts: Tensor | ClassCounts | WeightSource, k: int, *, group_size: int | None = None) -> None:
        super().__init__()
        source = counts if isinstance(counts, WeightSource) else WeightSource(counts, name="counts")
        self._set_up(source, _check.whole("k", k, 1, source.num_classes), group_size)

    @classmethod
    def from_probabilities(cls, probabilities: Tensor | WeightSource, *, group_size: int | None = None) -> "Bernoulli":
        """Keep class c with probability probabilities[c], any numbers in (0, 1].

        Raises:
            ValueError: a probability above 1, negative or NaN; when drawing, 0 for a class that is not explicit.
        """
        if isinstance(probabilities, WeightSource):
            source = probabilities
        else:
            source = WeightSource(probabilities, name="probabilities")
            above = source.read() > 1
            if above.any():
                raise ValueError(f"`probabilities` must be at most 1, {_check.at_first(probabilities, above)}")
        sampler = cls.__new__(cls)
        nn.Module.__init__(sampler)
        sampler._set_up(source, None, group_size)
        return sampler

    def _set_up(self, source: WeightSource, k: int | None, group_size: int | None) -> None:
        self.source = source
        self.k = k
        self.group_size = check_group_size(group_size)
        rate, certain = self._rates()
        # Padded, so that its shape does not change with the counts and any state can be loaded.
        self.register_buffer("_certain", certain)
        self.table = MassTable(rate, name=source.name)
        self._index()
        self.register_load_state_dict_post_hook(lambda sampler, _: sampler._index())

    def _rates(self) -> tuple[Tensor, Tensor]:
        """λ of each class (0 for those of b = 1), and the ids of those, padded with -1."""
        b = self.source.read()
        if self.k is not None:
            alpha = exponent(b.div_(float(b.sum())), min(self.k, int((b > 0).sum())))
            b = torch.where(b > 0, b.pow_(alpha), 0.0)
        # No more can be certain than are expected; the sum may have rounded down.
        room = int(b.sum() + 0.5) if self.k is None else self.k
        rate = b.neg_().log1p_().neg_()
        sure = rate.isinf()
        certain = torch.full((room,), -1, dtype=torch.int64, device=b.device)
        ids = sure.nonzero().squeeze(1)
        certain[: len(ids)] = ids
        return rate.masked_fill_(sure, 0.0), certain

    def _index(self) -> None:
        self._num_certain = int((self._certain >= 0).sum())
        self._draws = capacity(self.table.total)
        kept = sum(float(part.neg().expm1_().neg_().sum()) for part in self.table.parts())
        self._slots = min(capacity(kept), self._draws, self.num_classes - self._num_certain)

    @property
    def num_classes(self) -> int:
        return self.table.num_classes

    def forward(
        self,
        target: Tensor,
        *,
        hidden: Tensor | None = None,
        exclude: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Candidates:
        self.source.check_every_class_drawn()
        target, exclude = check_call(self.num_classes, target, exclude, self.table.device)
        blocks = []
        if self._num_certain:
            ids = self._certain[: self._num_certain].unsqueeze(0)
            blocks.append(Block(ids, torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)))
        if self._draws:
            blocks.append(self._toss(num_groups(len(target), self.group_size), target.device, generator))
        return Candidates(join(*blocks), exclude, self._log_kappa(target), self.num_classes)

    def _toss(self, groups: int, device: torch.device, generator: torch.Generator | None) -> Block:
        rate = torch.full((groups, 1), self.table.total, dtype=torch.float64, device=device)
        count = torch.poisson(rate, generator=generator)
        uniform = torch.rand(groups, self._draws, dtype=torch.float64, device=device, generator=generator)
        drawn = torch.arange(self._draws, device=device) < count
        nobody = self.num_classes
        ids = self.table.locate(uniform * self.table.total).masked_fill_(~drawn, nobody).sort(1).values
        # Each class once: what follows its first copy goes, with the draws that were not made, to a slot cut off below.
        first = (ids < nobody) & (ids != ids.roll(1, 1)).index_fill_(1, ids.new_zeros(1), True)
        slot = torch.where(first, first.cumsum(1) - 1, self._slots).clamp_(max=self._slots)
        kept = ids.new_full((groups, self._slots + 1), nobody).scatter_(1, slot, ids)[:, :-1]
        empty = kept == nobody
        kept = kept.masked_fill(empty, 0)
        return Block(kept, self._log_kappa(kept).masked_fill_(empty, -math.inf))

    def _log_kappa(self, ids: Tensor) -> Tensor:
        rate = self.table.mass(ids)
        return torch.where(rate > 0, -torch.log(-torch.expm1(-rate)), 0.0)

    def without(self, ids: Tensor) -> "Bernoulli":
        """The same design over all classes but these, which somebody else sums."""
        source = self.source.without(ids)
        if self.k is None:
            return Bernoulli.from_probabilities(source, group_size=self.group_size)
        return Bernoulli(source, self.k, group_size=self.group_size)

    def heaviest(self, n: int) -> Tensor:
        """The n classes that are drawn most often, in ascending order."""
        return self.source.heaviest(n)

    def refresh(self) -> None:
        """Solve α again and rebuild the table from the counts."""
        rate, certain = self._rates()
        self._certain = certain.to(self.table.device)
        self.table.fill(rate.to(self.table.device), name=self.source.name)
        self._index()

    def resize(self, num_classes: int) -> None:
        """Follow the counts to another number of classes."""
        _check.whole("num_classes", num_classes, self.k or 1)
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        return f"k={self.k}, group_size={self.group_size}"


def capacity(mean: float) -> int:
    """A number that a Poisson variable of this mean, and so any sum of coins of this mean, exceeds with probability
    below 1e-12 (Chernoff: P(N ≥ n) ≤ exp(n - mean - n log(n / mean)))."""
    if mean == 0:
        return 0
    n = math.ceil(mean)
    while n * math.log(n / mean) - n + mean < -math.log(_OVERFLOW):
        n += 1 + int(math.sqrt(mean) / 16)
    return n
