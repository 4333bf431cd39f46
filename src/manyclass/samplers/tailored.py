"""A draw that is made for its batch: classes in proportion to the largest probability that an example gives them."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from manyclass import _check, _ranks
from manyclass._context import isolated
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass._shard import Shard
from manyclass.candidates import Block, Candidates, contained
from manyclass.counts import ClassCounts
from manyclass.forms import DOT, Similarity
from manyclass.kernels import directions
from manyclass.samplers._cell_search import CellSearch
from manyclass.samplers._rebuild import BackgroundRebuild
from manyclass.samplers._sampler import (
    Observation,
    Sampler,
    check_group_size,
    check_vectors,
    checked_draw,
    num_groups,
)
from manyclass.samplers._scan import largest_log_p, largest_log_p_of_part, scan_dtype
from manyclass.samplers._sketch import Sketch, checked_square
from manyclass.samplers._source import WeightSource
from manyclass.samplers._teeth import Teeth
from manyclass.samplers._two_parts import MIN_PROBING_K, TwoParts

FORGOTTEN_SHARE = 0.2  # of the second moment, with each batch that is added to it
BATCHES_PER_SKETCH = 5
# Beyond, probing cells takes less time than a scan, and a default number of probes.
MAX_SCANNED_CLASSES = {"cpu": 1 << 15, "cuda": 1 << 24}
DEFAULT_PROBES = 32


class Tailored(nn.Module):
    """A draw of k distinct classes for each group of examples, π = min(1, a·w), from a sketch p̂ of their probabilities.

    For the examples n of a group, m(c) = max_n p̂_n(c), and w = (1 - mix) m/Σm + mix f with the frequencies f; a is
    solved for Σ π = k, and κ = 1/π. With true p the relative variance of Z̃ of every example is at most Σm/k. Wrong p̂
    cost variance, never bias. All classes are scanned at each draw, so a step takes time in proportion to C.

    With `probes`, each example scores only the classes of its most probable cells. Cells hold up to 8 classes with
    similar vectors; they are made from a copy of the class vectors on a background thread. The 64 most probable classes
    of each example are drawn as above with a part of k, all others by frequency with the rest, at most half of k. The
    part for the classes found is √Σm/(√Σm + 4), at least a half, with m of the examples that have found the class: 0.85
    if 512 examples are each sure of a different one. Slots stay empty where the draw by frequency hits a class found,
    or if fewer classes are found than their part has.

    The sketch has rank r: ŝ = (hidden V)(W V)ᵀ + b, with the leading eigenvectors V [D, r] of a running second moment
    of hidden, which is renewed on a background thread; W V is made at each draw. Before the first V, ŝ are the scores.

    Without `hidden`, or before class vectors are attached, w = f.

    Args:
        counts: ClassCounts, or C positive counts.
        k: classes drawn for a group, at most C; at least twice the examples of a group keep the noise of sampling
            below that of the minibatch.
        group_size: the greatest number of examples that share a draw; None: the whole batch.
        rank: the number of directions of the sketch. Default: the least multiple of 16 that holds 90 % of the energy
            of hidden, or all if that is more than half.
        mix: the share of the frequencies.
        nearest: the number of classes of the largest ŝ that are explicit for each example, in addition to k.
        every: training steps between two renewals of V; each is used a quarter as many steps later.
        probes: the number of cells that each example probes; 0: all classes are scanned. Default: 32 beyond 32,768
            classes, or on a GPU beyond 16,777,216, and 0 below: a scan takes longer, but has a smaller error.

    Raises:
        ValueError: k is above C; another number is out of range; a count is negative, infinite or NaN, or, when
            drawing, 0 for a class that is not explicit.

    Example:
        >>> sampler = Tailored(torch.ones(100), k=8, group_size=2)
        >>> sampler.attach(8 * torch.eye(100))
        >>> candidates = sampler(torch.arange(4), hidden=torch.eye(100)[:4])
        >>> candidates.ids().shape
        torch.Size([4, 8])
    """

    unbiased = True
    renormalises = False
    learns = True
    saved = ("weights", "moment", "directions", "progress", "pending_directions")
    by_class = ("weights",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        counts: Tensor | ClassCounts | WeightSource,
        k: int,
        *,
        group_size: int | None = 512,
        rank: int | None = None,
        mix: float = 0.05,
        nearest: int = 0,
        every: int = 50,
        probes: int | None = None,
    ) -> None:
        super().__init__()
        self.source = counts if isinstance(counts, WeightSource) else WeightSource(counts, name="counts")
        self.k = _check.integer("k", k, 1, self.source.num_classes)
        self.group_size = check_group_size(group_size)
        self.rank = None if rank is None else _check.integer("rank", rank, 1)
        self.mix = _check.number("mix", mix, low=0, strict=True)
        if mix > 1:
            raise ValueError(f"`mix` must be at most 1, got {mix}")
        self.nearest = _check.integer("nearest", nearest, 0, self.source.num_classes)
        self.every = _check.integer("every", every, 1)
        self.similarity = DOT
        self.schedule: BackgroundRebuild[Sketch] = BackgroundRebuild()
        self.sketch = Sketch.full(0, torch.device("cpu"))
        self.probes = None if probes is None else _check.integer("probes", probes, 0)
        if self.probes and k < MIN_PROBING_K:
            raise ValueError(f"`k` must be at least {MIN_PROBING_K} with `probes` above 0, got {k}")
        self.search = self._new_search()
        # float32 [D, D]: the running second moment of hidden, to some scale.
        self.moment = torch.zeros_like(self.sketch.directions)
        self._set_weights(self.source.read())

    def _set_weights(self, weight: Tensor) -> None:
        # float64 [C]: the counts in force, 0 for the classes that are left out.
        self.weights = weight
        total, drawn, shard = float(weight.sum()), int((weight > 0).sum()), self.source.shard
        if shard is not None:
            total, drawn = shard.sum(total), int(shard.sum(drawn))
        self.frequency = weight / total
        self._num_drawn = drawn
        self._set_teeth()

    def _set_teeth(self) -> None:
        self.teeth = Teeth(self.k, self._num_drawn, self.device, self.source.shard)
        scanned = MAX_SCANNED_CLASSES.get(self.device.type, max(MAX_SCANNED_CLASSES.values()))
        used = self.search is not None and (self.probes is not None or self.num_classes > scanned)
        # The draw if this device probes cells; its table takes as much memory as the others.
        self.parts = TwoParts(self.frequency, self.k, self.mix) if used and self.k >= MIN_PROBING_K else None

    def _new_search(self) -> CellSearch | None:
        # The state must not depend on the device, which may change, so there are cells wherever one of them needs them.
        most = min(MAX_SCANNED_CLASSES.values()) if self.probes is None else 0
        needed = self.probes != 0 and self.num_classes > most
        return CellSearch(self.num_classes, self.probes or DEFAULT_PROBES) if needed else None

    @property
    def probing(self) -> CellSearch | None:
        """The search in cells, if draws use it on this device."""
        # Cosines would need the lengths of all class vectors at each draw.
        return self.search if self.parts is not None and self.similarity.name == DOT.name else None

    directions = property(lambda self: self.sketch.directions)
    progress = property(lambda self: self.schedule.progress)

    @property
    def pending_directions(self) -> Tensor:
        """float32 [D, D]: the directions of the renewal in progress; 0 if there is none."""
        pending = self.schedule.pending()
        return torch.zeros_like(self.directions) if pending is None else pending.directions

    num_classes = property(lambda self: self.source.num_classes)
    device = property(lambda self: self.weights.device)

    def move(self, device: torch.device) -> None:
        """Move the tables to a device."""
        self.moment, self.sketch = self.moment.to(device), self.sketch.to(device)
        self.weights, self.frequency = self.weights.to(device), self.frequency.to(device)
        self._set_teeth()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved counts, second moment and directions."""
        weights = saved_vector("weights", state["weights"], torch.float64, len(self.weights))
        total = float(weights.sum()) if self.source.shard is None else self.source.shard.sum(float(weights.sum()))
        if not 0 < total < math.inf:
            raise ValueError(f"`weights` must have a finite sum above 0, got {total:g}")
        dim = self.sketch.dim or len(state["moment"])
        moment, directions, pending = (
            checked_square(name, state[name], dim) for name in ("moment", "directions", "pending_directions")
        )
        # The progress is checked before anything changes.
        self.schedule.restore(state["progress"], Sketch(pending) if pending.any() else None)
        self.source.restore_left_out(weights)
        self.moment, self.sketch = moment, Sketch(directions)
        self._set_weights(weights)

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Score these class vectors [C, D] and biases [C] at each draw."""
        check_vectors(weight, bias, len(self.weights))
        self.schedule.attach(*(x for x in (weight, bias) if x is not None))
        if self.search is not None:
            # A head attaches at each step, and moving a module takes time even if nothing moves.
            search = self.search if self.search.device == self.device else self.search.to(self.device)
            search.attach(*(x for x in (weight, bias) if x is not None))
        if self.sketch.dim != weight.shape[1]:
            self.sketch = Sketch.full(weight.shape[1], self.device)
            self.moment = torch.zeros_like(self.directions)

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone, which it scans.

        Raises:
            ValueError: cells or nearest classes are asked for, which are searched among all classes.
        """
        for name in ("probes", "nearest"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}` must be 0 if classes are divided among processes, got {getattr(self, name)}"
                )
        self.search, self.probes = None, 0
        self.source.divide(shard)
        # Class vectors of all classes are no longer those that are scanned.
        self.schedule.drop()
        self._set_weights(self.source.read().to(self.device))

    def advance(self) -> None:
        """Count a training step: the sketch follows the hidden vectors."""
        self.sketch = self.schedule.advance(self.sketch, self.every, self._snapshot)
        if self.probing is not None:
            self.probing.advance(self.moment)

    def _snapshot(self) -> Callable[[], Sketch]:
        moment = self.moment.clone()
        return lambda: Sketch.of(moment, self.rank)

    def observe(self, observation: Observation) -> None:
        """Learn from some of the steps."""
        if self.schedule.steps % max(1, self.every // BATCHES_PER_SKETCH) == 0:
            self.learn(observation)

    @torch.no_grad()
    def learn(self, observation: Observation) -> None:
        """Add hidden of a step, by all ranks, to the second moment."""
        if not self.schedule.is_attached:
            return
        hidden = directions(observation.hidden.float(), self.similarity)
        with torch.autocast(self.device.type, enabled=False):
            batch = hidden.T @ hidden
        moments = [moment / moment.trace() for (moment,) in _ranks.from_ranks(batch)]
        new = self.moment * (1 - FORGOTTEN_SHARE) + sum(moments)
        # A batch that overflows, or is 0, teaches nothing.
        self.moment = torch.where(new.isfinite().all(), new, self.moment)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        groups = num_groups(target, self.group_size)
        vectors = None if hidden is None else self._vectors()
        if self.probing is not None and hidden is not None and vectors is not None:
            self.probing.build_if_stale(self.moment)
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                found = self.probing.find(hidden, *vectors, groups, self.nearest)
                assert self.parts is not None
                block, log_kappa = self.parts.draw(target, found, generator)
            return self._candidates(target, exclude, block, found.nearest if self.nearest else None, log_kappa)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            weight, nearest = self.proposal(hidden, groups)
            pi = self.teeth.inclusion(weight)
            block = Block(*self.teeth.draw(pi, generator))
            group = block.spread(torch.arange(groups, device=target.device).unsqueeze(1), len(target)).squeeze(1)
            # Read now: a function that keeps π [G, C] would hold its memory until the backward pass.
            shard = self.source.shard
            if shard is None:
                target_pi = pi[group, target]
            else:
                block, target_pi = (
                    Block(block.ids + shard.first, block.log_kappa),
                    _of_targets(pi, group, target, shard),
                )
        return self._candidates(target, exclude, block, nearest, lambda: -target_pi.log())

    def _candidates(
        self,
        target: Tensor,
        exclude: Tensor,
        block: Block,
        nearest: Tensor | None,
        drawn_log_kappa: Callable[[], Tensor],
    ) -> Candidates:
        """Return a draw together with the nearest classes, which are explicit."""
        included = None
        if nearest is not None:
            included = nearest.masked_fill(contained(nearest, exclude.unsqueeze(1)).squeeze(1), -1)

        def target_log_kappa() -> Tensor:
            log_kappa = drawn_log_kappa()
            if included is None:
                return log_kappa
            return log_kappa.masked_fill((included == target.unsqueeze(1)).any(1), 0.0)

        excluded = exclude if included is None else torch.cat([exclude, included], 1)
        return Candidates((block,), excluded, target_log_kappa, self.num_classes, included)

    def proposal(self, hidden: Tensor | None, groups: int) -> tuple[Tensor, Tensor | None]:
        """Return the weights w, float64 [G, C], and the nearest classes, int64 [B, nearest]; None: there are none."""
        vectors = self._vectors()
        if hidden is None or vectors is None:
            return self.frequency.expand(groups, -1), None
        weight, bias = vectors
        dtype = scan_dtype(weight)
        rows = self.sketch.project(directions(weight, self.similarity, scaled=False), dtype)
        query = self.sketch.project(directions(hidden.detach(), self.similarity), dtype)
        size = -(-len(hidden) // groups)
        nearest: Tensor | None = None
        shard = self.source.shard
        if shard is None:
            log_p, nearest = largest_log_p(query, rows, bias, self.nearest, size)
        else:
            log_p = largest_log_p_of_part(query, rows, bias, size, shard)
        # NaN in hidden or class vectors is for the loss to report: if it is everywhere, a group draws by frequency.
        likelihood = log_p.double().exp_().nan_to_num_(nan=0.0, posinf=0.0)
        total = likelihood.sum(1, keepdim=True)
        total = total if shard is None else shard.summed(total)
        likelihood.mul_((1 - self.mix) / torch.where(total > 0, total, 1.0))
        return likelihood.add_(self.frequency, alpha=self.mix), nearest if self.nearest else None

    def _vectors(self) -> tuple[Tensor, Tensor | None] | None:
        """Return class vectors and biases, -inf for the classes that are left out; None if there are none."""
        # A compiled graph cannot ask whether a tensor has values.
        vectors = self.schedule.attached if torch.compiler.is_compiling() else self.schedule.vectors
        if len(vectors) == 0:
            return None
        weight, bias = vectors[0].detach(), vectors[1].detach().float().contiguous() if len(vectors) > 1 else None
        if self._num_drawn < self.num_classes:
            bias = torch.zeros_like(self.weights, dtype=torch.float32) if bias is None else bias
            bias = bias.masked_fill(self.weights == 0, -math.inf)
        return weight, bias

    def without(self, ids: Tensor) -> "Tailored":
        """Return the same design over all classes but these, which are summed elsewhere."""
        rest = Tailored(
            self.source.without(ids),
            self.k,
            group_size=self.group_size,
            rank=self.rank,
            mix=self.mix,
            nearest=self.nearest,
            every=self.every,
            probes=self.probes,
        )
        rest.similarity = self.similarity
        if self.schedule.vectors:
            rest.attach(*self.schedule.vectors)
        rest.moment, rest.sketch = self.moment.clone(), self.sketch
        return rest

    def heaviest(self, n: int) -> Tensor:
        """Return the n most frequent classes, in ascending order."""
        return self.source.heaviest(n).to(self.device)

    def set_k(self, k: int) -> None:
        """Draw another number of classes."""
        self.k = _check.integer("k", k, MIN_PROBING_K if self.probes else 1, self.num_classes)
        self._set_teeth()

    def refresh(self) -> None:
        """Read the counts again, and renew the sketch from the second moment."""
        self._set_weights(self.source.read().to(self.device))
        self.renew_sketch()
        if self.probing is not None:
            self.probing.refresh(self.moment)

    def renew_sketch(self) -> None:
        """Make the sketch from the present second moment."""
        self.schedule.drop()
        with isolated():
            self.sketch = self._snapshot()()

    def resize(self, num_classes: int) -> None:
        """Resize the counts; class vectors must be attached again before they are scored."""
        _check.integer("num_classes", num_classes, max(self.k, self.nearest))
        self.source.resize(num_classes)
        self.search = self._new_search()
        self.refresh()
        self.schedule.restart()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, group_size={self.group_size}, rank={self.rank}, mix={self.mix:g}, nearest={self.nearest}"


def _of_targets(pi: Tensor, group: Tensor, target: Tensor, shard: Shard) -> Tensor:
    """Return π of the targets [B], of which each process knows those of its classes."""
    if shard.size == 0:
        return shard.summed(torch.zeros(target.shape, dtype=pi.dtype, device=pi.device))
    held = shard.holds(target)
    return shard.summed(pi[group, torch.where(held, target - shard.first, 0)].masked_fill(~held, 0.0))


def score_by(sampler: Sampler, similarity: Similarity) -> None:
    """Let every `Tailored` of a sampler score classes by the similarity of its head."""
    for part in sampler.modules() if isinstance(sampler, nn.Module) else ():
        if isinstance(part, Tailored):
            part.similarity = similarity
