"""Systematic sampling: a fixed number of distinct classes, inclusion probabilities proportional to size."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._loaded_state import follow_loaded_state
from manyclass.candidates import Block, Candidates, put_in_front
from manyclass.counts import ClassCounts
from manyclass.kernels import cpu
from manyclass.samplers._inclusion import split_certain
from manyclass.samplers._order import ClassOrder, first_order
from manyclass.samplers._sampler import check_group_size, checked_draw, no_learning, num_groups
from manyclass.samplers._source import WeightSource
from manyclass.samplers._table import MassTable


class Systematic(nn.Module):
    """A draw of k distinct classes with inclusion probabilities π = min(1, a·weight), a solved for Σ π = k.

    The classes lie on a line, each as long as its π, and a comb of unit spacing falls on it at one random offset:
    one uniform number and k searches. κ = 1/π. Classes of π = 1 are in every draw, so they are summed explicitly.

    A comb takes from each part of the line as many classes as the part is long, to within one. So if neighbours are
    similar, draws differ less from each other. The order never changes π.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes drawn, at most C.
        power: exponent of the weights; 0 is uniform.
        order: the order of the classes on the line. None: by id; "frequency": heaviest first; "random": another one
            after each `refresh()`; "cluster": neighbours have similar class vectors, from the first draw after
            `attach`, and by id before; or a permutation of the ids.
        stratified: whether every tooth of the comb has a separate random offset. A class that lies across the
            boundary of two teeth may then be drawn twice, each time with κ = 1/π.
        group_size: the number of examples that share a draw; None: the whole batch.

    Raises:
        ValueError: k is above C; a weight is negative, infinite or NaN; `order` is not a permutation; or, when
            drawing, a class that is not explicit has weight 0.

    Example:
        >>> sampler = Systematic(torch.tensor([9.0, 1.0, 1.0, 1.0]), k=2)
        >>> candidates = sampler(torch.tensor([3]), generator=torch.Generator().manual_seed(0))
        >>> candidates.ids(), candidates.log_kappa().exp().round()
        (tensor([[0, 3]]), tensor([[1., 3.]], dtype=torch.float64))
    """

    unbiased = True
    renormalises = False
    learns = False
    observe = no_learning
    _certain: Tensor

    def __init__(
        self,
        weights: Tensor | ClassCounts | WeightSource,
        k: int,
        *,
        power: float = 1.0,
        order: str | Tensor | None = None,
        stratified: bool = False,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        self.source = weights if isinstance(weights, WeightSource) else WeightSource(weights, power=power)
        self.k = _check.integer("k", k, 1, self.source.num_classes)
        self.stratified = stratified
        self.group_size = check_group_size(group_size)
        self.order: ClassOrder | None = None
        weight, arranged = self.source.read(), None
        if order is not None:
            self.order = ClassOrder(order if isinstance(order, str) else "given")
            arranged = self.order.sort(weight, first_order(order, len(weight)).to(weight.device))
        mass, certain = split_certain(weight, self.k)
        self.register_buffer("_certain", certain)
        self.table = MassTable(mass, order=arranged)
        self._derive()
        follow_loaded_state(self, Systematic._after_load)

    def _after_load(self, _: object) -> None:
        """Raise ValueError if a loaded state would draw an id outside [0, C) or a class twice."""
        certain = self._certain
        inside = certain.dim() == 1 and bool(((certain >= 0) & (certain < self.num_classes)).all())
        if not inside or len(certain) > self.k or len(certain.unique()) < len(certain):
            raise ValueError(f"at most {self.k} classes must be drawn each time, all different, got others")
        if self.order is not None:
            self.order.check_size(self.num_classes)
        self._derive()

    def _derive(self) -> None:
        """Compute the number of teeth of the comb and their spacing."""
        self._teeth = self.k - len(self._certain) if self.table.total else 0
        self._spacing = self.table.total / max(self._teeth, 1)
        self._log_spacing = math.log(self._spacing or 1.0)

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Order classes by these vectors [C, D], if the order is "cluster"."""
        if self.order is not None:
            self.order.attach(weight, self.num_classes)

    def advance(self) -> None:
        """Count a training step: an order by clusters follows the class vectors."""
        if self.order is not None and self.order.advance():
            self.reorder()

    num_classes = property(lambda self: self.table.num_classes)
    device = property(lambda self: self.table.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        if self.order is not None and self.order.build_if_stale():
            self.reorder()
        groups = num_groups(target, self.group_size)
        offsets = self._teeth if self.stratified else 1
        offset = torch.rand(groups, offsets, dtype=torch.float64, device=target.device, generator=generator)
        if groups == 1 and not self.stratified and cpu.is_available(offset):
            block = Block(*cpu.comb(self.table.cpu_table(), offset, self._spacing, self._teeth, self._certain))
            return Candidates((block,), exclude, lambda: self._log_kappa(target), self.num_classes)
        comb = torch.arange(self._teeth, dtype=torch.float64, device=target.device)
        ids, mass = self.table.locate((offset + comb).mul_(self._spacing))
        block = Block(ids, self._log_spacing - mass.log_())
        return Candidates(
            put_in_front(self._certain, block), exclude, lambda: self._log_kappa(target), self.num_classes
        )

    def reorder(self) -> None:
        """Put the classes on the line in the present order of clusters."""
        assert self.order is not None
        # The masses are those of the table: the weights may be newer than it, or older than a loaded table.
        mass = self.table.mass(torch.arange(self.num_classes, device=self.device))
        self.table.rebuild(mass, order=self.order.sort_by_cluster())
        self._derive()

    def _log_kappa(self, ids: Tensor) -> Tensor:
        mass = self.table.mass(ids)
        return torch.where(mass > 0, self._log_spacing - mass.log(), 0.0)

    def without(self, ids: Tensor) -> "Systematic":
        """Return the same design over all classes but these, which are summed elsewhere."""
        current = self.order
        rest = Systematic(
            self.source.without(ids),
            self.k,
            order=self.table.order if current is None or current.rule == "given" else current.rule,
            stratified=self.stratified,
            group_size=self.group_size,
        )
        for vectors in () if current is None else current.vectors:
            rest.attach(vectors)
        return rest

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self.source.heaviest(n)

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.k = _check.integer("k", k, 1, self.num_classes)
        self.refresh()

    def use_table(self, table: MassTable) -> None:
        """Draw from another table; a class without mass in it is certain, unless it is summed elsewhere."""
        self.table, self._certain = table, table.absent()
        if self.source.left_out is not None:
            left_out = torch.isin(self._certain, self.source.left_out.to(self._certain.device))
            self._certain = self._certain[~left_out]
        self._derive()

    def refresh(self) -> None:
        """Rebuild the table from the counts."""
        weight = self.source.read().to(self.table.device)
        arranged = None
        if self.order is not None and self.table.order is not None:
            arranged = self.order.sort(weight, self.table.order)
        mass, self._certain = split_certain(weight, self.k)
        self.table.rebuild(mass, order=arranged)
        self._derive()

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        _check.integer("num_classes", num_classes, self.k)
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        stratified = ", stratified=True" if self.stratified else ""
        return f"k={self.k}{stratified}, group_size={self.group_size}"
