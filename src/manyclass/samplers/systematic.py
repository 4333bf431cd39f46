"""Systematic sampling: a fixed number of distinct classes, inclusion probabilities proportional to size."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check, native
from manyclass._derived import follow_loaded_state
from manyclass.candidates import Block, Candidates, put_in_front
from manyclass.counts import ClassCounts
from manyclass.samplers._sampler import check_group_size, checked_draw, num_groups
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable


class Systematic(nn.Module):
    """k distinct classes; class c is among them with probability π = min(1, a·weight), a solved for Σ π = k.

    The classes lie on a line, each as long as its π, and a comb of unit spacing falls on it at one random offset:
    one uniform number and k searches. κ = 1/π. Classes of π = 1 are always there and are explicit by themselves.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes drawn, at most C.
        power: exponent of the weights; 0 is uniform.
        group_size: how many examples share a draw; None: the batch; 1: each its own.

    Raises:
        ValueError: k above C; weights negative, infinite or NaN; when drawing, 0 for a class that is not explicit.

    Example:
        >>> sampler = Systematic(torch.tensor([9.0, 1.0, 1.0, 1.0]), k=2)
        >>> candidates = sampler(torch.tensor([3]), generator=torch.Generator().manual_seed(0))
        >>> candidates.ids(), candidates.log_kappa().exp().round()
        (tensor([[0, 3]]), tensor([[1., 3.]], dtype=torch.float64))
    """

    unbiased = True
    renormalises = False
    _certain: Tensor

    def __init__(
        self, weights: Tensor | ClassCounts | WeightSource, k: int, *, power: float = 1.0, group_size: int | None = None
    ) -> None:
        super().__init__()
        self.source = weights if isinstance(weights, WeightSource) else WeightSource(weights, power=power)
        self.k = _check.whole("k", k, 1, self.source.num_classes)
        self.group_size = check_group_size(group_size)
        mass, certain = _split(self.source.read(), self.k)
        self.register_buffer("_certain", certain)
        self.table = MassTable(mass)
        self.derive()
        follow_loaded_state(self)

    def derive(self) -> None:
        """How many classes are left to the comb, and how far apart its teeth are."""
        self._teeth = self.k - len(self._certain) if self.table.total else 0
        self._spacing = self.table.total / max(self._teeth, 1)
        self._log_spacing = math.log(self._spacing or 1.0)

    @property
    def num_classes(self) -> int:
        return self.table.num_classes

    @property
    def device(self) -> torch.device:
        return self.table.device

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """As a call, for arguments that have been checked."""
        self.source.check_every_class_drawn()
        groups = num_groups(target, self.group_size)
        offset = torch.rand(groups, 1, dtype=torch.float64, device=target.device, generator=generator)
        if groups == 1 and native.runs_on(offset):
            block = Block(*native.comb(self.table.searched(), offset, self._spacing, self._teeth, self._certain))
            return Candidates((block,), exclude, lambda: self._log_kappa(target), self.num_classes)
        comb = torch.arange(self._teeth, dtype=torch.float64, device=target.device)
        ids, mass = self.table.locate((offset + comb).mul_(self._spacing))
        block = Block(ids, self._log_spacing - mass.log_())
        return Candidates(
            put_in_front(self._certain, block), exclude, lambda: self._log_kappa(target), self.num_classes
        )

    def _log_kappa(self, ids: Tensor) -> Tensor:
        mass = self.table.mass(ids)
        return torch.where(mass > 0, self._log_spacing - mass.log(), 0.0)

    def without(self, ids: Tensor) -> "Systematic":
        """The same design over all classes but these, which somebody else sums."""
        return Systematic(self.source.without(ids), self.k, group_size=self.group_size)

    def heaviest(self, n: int) -> Tensor:
        """The n classes that are drawn most often, in ascending order."""
        return self.source.heaviest(n)

    def refresh(self) -> None:
        """Rebuild the table from the counts."""
        mass, self._certain = _split(self.source.read().to(self.table.device), self.k)
        self.table.fill(mass)
        self.derive()

    def resize(self, num_classes: int) -> None:
        """Follow the counts to another number of classes."""
        _check.whole("num_classes", num_classes, self.k)
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        return f"k={self.k}, group_size={self.group_size}"


def _split(weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Masses of the classes of π < 1 (0 for the others), and the ids of the others.

    With the n heaviest classes certain, a = (k - n) / (weight of the rest); one more is certain while its own
    a·weight reaches 1. At most k classes can be, so only the k heaviest are looked at.
    """
    positive = weight > 0
    if int(positive.sum()) <= k:
        return torch.zeros_like(weight), positive.nonzero().squeeze(1)
    heaviest, ids = weight.topk(k)
    n_th = torch.arange(k, 0, -1, dtype=torch.float64, device=weight.device)
    mass = weight.index_fill(0, ids, 0.0)
    rest = mass.sum() + heaviest.flip(0).cumsum(0).flip(0)
    # Ties may round to either side of 1; a class of π within 1e-12 of it is as well certain.
    reaches = heaviest * n_th >= rest * (1 - 1e-12)
    n = int(reaches.long().cumprod(0).sum())
    return mass.index_copy_(0, ids[n:], heaviest[n:]), ids[:n].sort().values
