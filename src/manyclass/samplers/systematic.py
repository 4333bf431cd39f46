"""Systematic sampling: a fixed number of distinct classes, inclusion probabilities proportional to size."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state
from manyclass._shard import Shard
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._comb import Comb
from manyclass.samplers._order import first_line
from manyclass.samplers._sampler import check_group_size, checked_draw, no_learning, num_groups
from manyclass.samplers._source import WeightSource


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
    saved = ("weights", "line")
    by_class = ("weights",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

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
        weight = self.source.read()
        self.order, line = first_line(order, weight)
        self.comb = Comb.of(weight, self.k, order=line)

    weights = property(lambda self: self.comb.weights)
    line = property(lambda self: self.comb.line)

    def move(self, device: torch.device) -> None:
        """Move the tables to a device."""
        self.comb = self.comb.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the tables from saved weights and their saved order."""
        shard = self.source.shard
        size = self.num_classes if shard is None else shard.size
        comb = Comb.restored(state["weights"], state["line"], size, self.k, shard=shard)
        self.source.restore_left_out(state["weights"])
        self.comb = comb

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Order classes by these vectors [C, D], if the order is "cluster"."""
        if self.order is not None:
            self.order.attach(weight, self.num_classes)

    def advance(self) -> None:
        """Count a training step: an order by clusters follows the class vectors."""
        if self.order is not None and self.order.advance():
            self.reorder()

    def is_settled(self, draws: int) -> bool:
        """Return True unless clusters of class vectors would change the order after the first advance."""
        return self.order is None or self.order.is_settled(draws)

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the comb, which a recorded draw reads."""
        return (self.comb,)

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone, on the line by id."""
        self.order = None
        self.source.divide(shard)
        self.comb = Comb.of(self.source.read().to(self.device), self.k, shard=shard)

    num_classes = property(lambda self: self.comb.num_classes)
    device = property(lambda self: self.comb.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        if self.order is not None and self.order.build_if_stale():
            self.reorder()
        # The function below may be called after the comb has been replaced.
        comb, groups = self.comb, num_groups(target, self.group_size)
        blocks = comb.draw(groups, stratified=self.stratified, generator=generator)
        return Candidates(blocks, exclude, lambda: comb.log_kappa(target), self.num_classes)

    def reorder(self) -> None:
        """Put the classes on the line in the present order of clusters."""
        assert self.order is not None
        self.comb = self.comb.arranged(self.order.sort_by_cluster())

    def without(self, ids: Tensor) -> "Systematic":
        """Return the same design over all classes but these, which are summed elsewhere."""
        current = self.order
        rest = Systematic(
            self.source.without(ids),
            self.k,
            order=self.comb.table.order if current is None or current.rule == "given" else current.rule,
            stratified=self.stratified,
            group_size=self.group_size,
        )
        for vectors in () if current is None else current.vectors:
            rest.attach(vectors)
        return rest

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self.source.heaviest(n).to(self.device)

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.k = _check.integer("k", k, 1, self.num_classes)
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the tables from the counts."""
        weight, line = self.source.read().to(self.device), None
        if self.order is not None and self.comb.table.order is not None:
            line = self.order.sort(weight, self.comb.table.order)
        self.comb = Comb.of(weight, self.k, order=line, shard=self.source.shard)

    def resize(self, num_classes: int) -> None:
        """Resize the counts and rebuild from them."""
        _check.integer("num_classes", num_classes, self.k)
        self.source.resize(num_classes)
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        stratified = ", stratified=True" if self.stratified else ""
        return f"k={self.k}{stratified}, group_size={self.group_size}"
