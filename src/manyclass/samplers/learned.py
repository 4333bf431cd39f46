"""Systematic sampling with inclusion probabilities learned from the model."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check, _ranks
from manyclass._context import isolated
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass._recording import is_recorded
from manyclass._shard import Shard
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._comb import Comb
from manyclass.samplers._fixed_comb import FixedComb
from manyclass.samplers._order import first_line
from manyclass.samplers._rebuild import BackgroundRebuild
from manyclass.samplers._sampler import Observation, check_group_size, checked_draw, num_groups
from manyclass.samplers._source import restored_left_out
from manyclass.samplers._table import MAX_TOTAL


class Learned(nn.Module):
    """`Systematic` with π ∝ a running estimate of each class's root-mean-square probability, plus its frequency.

    The relative variance of Z̃ is Σ (1/π - 1) p², so the best π for a whole batch is proportional to the root mean
    square of p over its examples; frequencies, the mean of p, only resemble it. When a class has been scored, the head
    reports its mean square over the batch (0 where it is the target), and the estimate moves towards it by the factor
    min(1, forget / π): rare draws move it further, so that on average all classes forget at the same rate. The
    frequencies keep every π above 0. Nothing is learned with an objective that has no Z̃.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes drawn, at most C.
        forget: the share of the estimate that a step replaces.
        mix: the factor of the frequencies, which are added to the normalised estimate.
        every: steps between two rebuilds of the table on a background thread; each is used a quarter as many steps
            later. Default: the larger of 50 and √C.
        order: the order of the classes on the line, as for `Systematic`.
        group_size: the greatest number of examples that share a draw, each group at another offset; None: the whole
            batch. It learns from the first group.

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
    saved = ("weights", "line", "estimate", "progress", "pending_weights", "pending_line")
    by_class = ("weights", "estimate", "pending_weights")
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        counts: Tensor | ClassCounts,
        k: int,
        *,
        forget: float = 0.005,
        mix: float = 0.5,
        every: int | None = None,
        order: str | Tensor | None = None,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        self.counts = counts if isinstance(counts, ClassCounts) else ClassCounts(counts)
        self.forget = _check.number("forget", forget, low=0, strict=True)
        self.mix = _check.number("mix", mix, low=0, strict=True)
        self._every = None if every is None else _check.integer("every", every, 1)
        self.k = _check.integer("k", k, 1, self.counts.num_classes)
        self.group_size = check_group_size(group_size)
        # Ids of classes that are summed elsewhere and must not be drawn.
        self._left_out: Tensor | None = None
        frequency = self.counts.frequency()
        # float64 [C]: the estimated mean square of each class's probability.
        self.estimate = frequency.square()
        self.order, line = first_line(order, frequency)
        self.comb = Comb.of(frequency, self.k, order=line)
        self.schedule: BackgroundRebuild[Comb] = BackgroundRebuild()
        # The storage that a recorded step draws from.
        self._fixed: FixedComb | None = None

    weights = property(lambda self: self.comb.weights)
    line = property(lambda self: self.comb.line)

    @property
    def progress(self) -> Tensor:
        """int64 [2]: the number of steps of the schedule, and its staleness."""
        return self.schedule.progress

    @property
    def pending_weights(self) -> Tensor:
        """float64 [C]: the weights of the rebuild in progress; 0 if there is none."""
        pending = self.schedule.pending()
        return torch.zeros_like(self.estimate) if pending is None else pending.weights

    @property
    def pending_line(self) -> Tensor:
        """int32 or int64 [C]: the order of the rebuild in progress, 0 if there is none; [0]: by id."""
        pending = self.schedule.pending()
        return torch.zeros_like(self.line) if pending is None else pending.line

    def move(self, device: torch.device) -> None:
        """Move the tables to a device."""
        self.comb, self.estimate = self.comb.to(device), self.estimate.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the tables from saved weights, and continue from the saved estimate."""
        shard = self.counts.shard
        estimate = saved_vector("estimate", state["estimate"], torch.float64, len(self.estimate))
        total, some = float(estimate.sum()), bool(state["pending_weights"].any())
        if shard is not None:
            total, some = shard.sum(total), shard.sum(some) > 0
        if not 0 < total < MAX_TOTAL:
            raise ValueError(f"`estimate` must have a finite sum above 0, got {total:g}")
        comb, pending = Comb.restored(state["weights"], state["line"], len(estimate), self.k, shard=shard), None
        left_out = self._left_out
        # Without smoothing, classes that do not occur have weight 0 too.
        if self.counts.smoothing != 0 and shard is None:
            left_out = restored_left_out(state["weights"], left_out)
        if some:
            weights, line = state["pending_weights"], state["pending_line"]
            pending = Comb.restored(weights, line, len(estimate), self.k, shard=shard)
        self.schedule.restore(state["progress"], pending)
        self.comb, self.estimate, self._left_out = comb, estimate, left_out

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Order classes by these vectors [C, D], if the order is "cluster"."""
        if self.order is not None:
            self.order.attach(weight, self.num_classes)

    def advance(self) -> None:
        """Count a training step: rebuild the tables if that is due, and follow the class vectors."""
        self.comb = self.schedule.advance(self.comb, self.every, self._snapshot)
        if self.order is not None and self.order.advance():
            self.reorder()

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone, on the line by id."""
        self.order = None
        self.counts.divide(shard)
        self.estimate = self.estimate[shard.classes].clone()
        if self._left_out is not None:
            self._left_out = self._left_out[shard.holds(self._left_out)] - shard.first
        self.schedule.drop()
        self.comb = Comb.of(self._current_weight(), self.k, shard=shard)

    num_classes = property(lambda self: self.comb.num_classes)
    device = property(lambda self: self.comb.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.order_if_stale()
        groups = num_groups(target, self.group_size)
        if is_recorded():
            fixed = self._fixed
            assert fixed is not None
            block = fixed.draw(groups, generator=generator)
            return Candidates((block,), exclude, lambda: fixed.log_kappa(target), self.num_classes)
        # The function below may be called after the comb has been replaced.
        comb = self.comb
        block = _one_block(comb.draw(groups, stratified=False, generator=generator), groups)
        return Candidates((block,), exclude, lambda: comb.log_kappa(target), self.num_classes)

    def is_settled(self, draws: int) -> bool:
        """Return True unless a table would be rebuilt, or the order changed, after the first advance."""
        settled = self.schedule.is_settled(self.every, draws)
        return settled and (self.order is None or self.order.is_settled(draws))

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the tables that a recorded step reads and writes; rebuilt ones are copied into fixed storage."""
        if compiled:
            return self.comb, self.estimate
        with isolated():
            if self._fixed is None or not self._fixed.fits(self.comb):
                self._fixed = FixedComb(self.comb)
            self._fixed.load(self.comb)
        return self._fixed, self.estimate

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no recorded steps.
        return {**self.__dict__, "_fixed": None}

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Move the estimates of the classes drawn, by every rank in turn."""
        (block,) = observation.candidates.blocks
        if self.counts.shard is not None:
            # The batch is that of all processes already, and no other holds these classes.
            self._learn(block.ids[0] - self.counts.shard.first, block.log_kappa[0], observation.probability())
            return
        # With several groups, the first: ranks may have different numbers of groups, but exchange equal shapes.
        for drawn in _ranks.from_ranks(block.ids[0], block.log_kappa[0], observation.probability()):
            self._learn(*drawn)

    def _learn(self, ids: Tensor, log_kappa: Tensor, probability: Tensor) -> None:
        """Move the estimates of the classes of one draw [K]."""
        # κ = 1/π, and 0 for a slot that a wrapper has emptied. The draw is without replacement: no class twice.
        kappa = log_kappa.exp()
        rate = (self.forget * kappa).clamp_(max=1.0)
        known = self.estimate[ids]
        change = rate * (probability.to(known).square() - known)
        # A batch that overflows teaches nothing, as a gradient scaler skips its step. Added, since an empty slot may
        # hold a class that is drawn in another one.
        self.estimate.index_add_(0, ids, torch.where((kappa > 0) & change.isfinite(), change, 0.0))

    def _snapshot(self) -> Callable[[], Comb]:
        """Copy the inputs of a build, and return the function that builds a comb from them."""
        estimate, frequency, k = self.estimate.clone(), self.counts.frequency(), self.k
        order, current, left_out = self.order, self.comb, self._left_out
        shard = None if self.counts.shard is None else self.counts.shard.in_background()

        def build() -> Comb:
            weight, line = _weight(estimate, frequency, self.mix, left_out, shard), current.table.order
            # Only this order depends on the weights.
            if order is not None and line is not None and order.rule == "frequency":
                line = order.sort(weight, line)
            return Comb.of(weight, k, order=line, shard=shard)

        return build

    @property
    def every(self) -> int:
        """The steps between two rebuilds of the table."""
        return self._every or max(50, math.isqrt(self.num_classes))

    def order_if_stale(self) -> None:
        """Order the classes by newly attached class vectors."""
        if self.order is not None and self.order.build_if_stale():
            self.reorder()

    def reorder(self) -> None:
        """Put the classes on the line in the present order of clusters."""
        assert self.order is not None
        self.comb = self.comb.arranged(self.order.sort_by_cluster())

    def without(self, ids: Tensor) -> "Learned":
        """Return the same design over all classes but these, which are summed elsewhere."""
        order = self.comb.table.order if self.order is None or self.order.rule == "given" else self.order.rule
        options = {"forget": self.forget, "mix": self.mix, "every": self._every, "group_size": self.group_size}
        rest = Learned(self.counts, self.k, order=order, **options)  # type: ignore[arg-type]
        rest.estimate = self.estimate.clone()
        rest._left_out = ids if self._left_out is None else torch.cat([self._left_out, ids])
        for vectors in () if self.order is None else self.order.vectors:
            rest.attach(vectors)
        rest.refresh()
        return rest

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self._current_weight().topk(n).indices.sort().values

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.k = _check.integer("k", k, 1, self.num_classes)
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the tables from the estimate and the counts."""
        self.schedule.drop()
        weight, line = self._current_weight(), self.comb.table.order
        if self.order is not None and line is not None:
            line = self.order.sort(weight, line)
        self.comb = Comb.of(weight, self.k, order=line, shard=self.counts.shard)

    def _current_weight(self) -> Tensor:
        return _weight(self.estimate, self.counts.frequency(), self.mix, self._left_out, self.counts.shard)

    def resize(self, num_classes: int) -> None:
        """Resize the counts; the estimates of new classes start from their frequencies."""
        _check.integer("num_classes", num_classes, self.k)
        self.counts.resize(num_classes)
        estimate = self.counts.frequency().square_().to(self.device)
        kept = min(num_classes, self.num_classes)
        estimate[:kept] = self.estimate[:kept]
        self.estimate = estimate
        if self._left_out is not None:
            self._left_out = self._left_out[self._left_out < num_classes]
        self.refresh()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"forget={self.forget:g}, mix={self.mix:g}"


def _one_block(blocks: tuple[Block, ...], groups: int) -> Block:
    """Return a block of all slots: classes that are certain are drawn for each group."""
    if len(blocks) == 1:
        return blocks[0]
    parts = [(block.ids.expand(groups, -1), block.log_kappa.expand(groups, -1)) for block in blocks]
    ids, log_kappa = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return Block(ids, log_kappa)


def _weight(estimate: Tensor, frequency: Tensor, mix: float, left_out: Tensor | None, shard: Shard | None) -> Tensor:
    """Return the weights [C] of a design, 0 for the classes that are left out."""
    learnt = estimate.sqrt()
    total = learnt.sum() if shard is None else shard.sum(float(learnt.sum()))
    weight = learnt.div_(total).add_(frequency.to(learnt.device), alpha=mix)
    if left_out is not None:
        weight[left_out.to(weight.device)] = 0.0
    return weight
