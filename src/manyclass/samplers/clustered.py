"""A separate draw for each group of similar examples, from the clusters of classes that are likely for it."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import is_transformed, isolated
from manyclass._plain_state import load_state, move_state, save_state, saved_ids
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._clusters import Clusters
from manyclass.samplers._rebuild import BackgroundRebuild, default_interval
from manyclass.samplers._sampler import check_vectors, checked_draw, no_learning
from manyclass.samplers._source import WeightSource


class Clustered(nn.Module):
    """k classes for each group of similar examples: the heaviest ones explicit, the rest drawn from likely clusters.

    Class vectors are clustered. For an example, cluster j has the weight exp(hidden · centroid) times that of its
    classes: a model of p in √C numbers. The batch is sorted by the likeliest cluster and cut into groups; the proposal
    M(j) of a group is the root mean square over its examples, plus `mix` times the weights alone. The share of a class
    in the weight of its cluster is r. A comb of unit spacing falls on the line of masses k M r, with one random
    offset for each group: O(√C + k) a step, κ = 1/(k M r). A class of k M r above 1 is drawn for certain, κ = 1, and
    its further slots are empty. Stale clusters cost variance, never bias; they are rebuilt on a background thread from
    a copy of the class vectors, and used a quarter of `every` steps later.

    Without `hidden`, or before class vectors are attached, M is the weights alone.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes scored for an example in addition to its target, the explicit ones included; at most C.
        explicit: the number of heaviest classes that every example sums. Default: an eighth of k.
        group_size: the number of similar examples that share a draw.
        clusters: the number of clusters. Default: 4√C, and at most a quarter of C.
        mix: the factor of the weights alone in the proposal.
        every: training steps between two clusterings. Default: the larger of 500 and C/64.

    Raises:
        ValueError: k is above C; no class is left to draw; a weight is not positive; another number is out of range.

    Example:
        >>> sampler = Clustered(torch.ones(100), k=20, group_size=2)
        >>> sampler.attach(torch.randn(100, 8))
        >>> candidates = sampler(torch.arange(4), hidden=torch.randn(4, 8))
        >>> candidates.ids().shape
        torch.Size([4, 20])
    """

    unbiased = True
    renormalises = False
    learns = False
    observe = no_learning
    saved = (
        "explicit",
        "labels",
        "weights",
        "centroids",
        "progress",
        "pending_labels",
        "pending_weights",
        "pending_centroids",
    )
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        weights: Tensor | ClassCounts | WeightSource,
        k: int,
        *,
        explicit: int | None = None,
        group_size: int = 32,
        clusters: int | None = None,
        mix: float = 0.1,
        every: int | None = None,
    ) -> None:
        super().__init__()
        self.source = weights if isinstance(weights, WeightSource) else WeightSource(weights)
        classes = self.source.num_classes
        self.k = _check.integer("k", k, 1, classes)
        self.group_size = _check.integer("group_size", group_size, 1)
        self.mix = _check.number("mix", mix, low=0, strict=True)
        self._num_explicit = k // 8 if explicit is None else _check.integer("explicit", explicit, 0, k - 1)
        self._num_clusters = None if clusters is None else _check.integer("clusters", clusters, 1, classes)
        self._every = None if every is None else _check.integer("every", every, 1)
        self.schedule: BackgroundRebuild[Clusters] = BackgroundRebuild()
        self._set_up()

    def _set_up(self) -> None:
        weight = self.source.read()
        # int64 [n]: the ids of the heaviest classes.
        self.explicit = weight.topk(self._num_explicit).indices.sort().values
        weight[self.explicit] = 0.0
        if not (weight > 0).any():
            raise ValueError(
                f"`explicit` must leave a class to draw, got {self._num_explicit} of {len(weight)} classes"
            )
        number = self._num_clusters or max(1, min(4 * math.isqrt(len(weight)), len(weight) // 4))
        self.clusters = Clusters.by_id(weight, number)

    labels = property(lambda self: self.clusters.labels)
    weights = property(lambda self: self.clusters.weights)
    centroids = property(lambda self: self.clusters.centroids)
    progress = property(lambda self: self.schedule.progress)
    pending_labels = property(lambda self: self._pending("labels"))
    pending_weights = property(lambda self: self._pending("weights"))
    pending_centroids = property(lambda self: self._pending("centroids"))

    def _pending(self, name: str) -> Tensor:
        """Return a tensor of the rebuild in progress; zeros if there is none."""
        pending = self.schedule.pending()
        found: Tensor = getattr(self.clusters if pending is None else pending, name)
        return torch.zeros_like(found) if pending is None else found

    def move(self, device: torch.device) -> None:
        """Move the clusters to a device."""
        self.clusters, self.explicit = self.clusters.to(device), self.explicit.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved clusters."""
        explicit = saved_ids("explicit", state["explicit"], self.num_classes, length=self._num_explicit)
        clusters = self._restored(state, "")
        pending = self._restored(state, "pending_") if state["pending_weights"].any() else None
        self.schedule.restore(state["progress"], pending)
        self.explicit, self.clusters = explicit, clusters

    def _restored(self, state: Mapping[str, Tensor], prefix: str) -> Clusters:
        parts = (state[prefix + name] for name in ("labels", "weights", "centroids"))
        found = Clusters.restored(*parts, num_classes=self.num_classes, number=self.clusters.number)
        if self.centroids.shape[1] not in (0, found.centroids.shape[1]):
            raise ValueError(f"`centroids` must have length {self.centroids.shape[1]}, got {found.centroids.shape[1]}")
        return found

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Cluster these class vectors [C, D], at the next draw and then every few training steps.

        The bias is not used: the weights of frequent classes already reflect it.
        """
        check_vectors(weight, None, self.num_classes)
        self.schedule.attach(weight)
        if self.centroids.shape[1] != weight.shape[1]:
            zeros = self.centroids.new_zeros(self.clusters.number, weight.shape[1])
            self.clusters = self.clusters.with_centroids(zeros)

    def advance(self) -> None:
        """Count a training step: the clusters follow the class vectors."""
        if self.schedule.vectors:
            self._build_if_stale()
            self.clusters = self.schedule.advance(self.clusters, self.every, self._snapshot)

    num_classes = property(lambda self: self.source.num_classes)
    device = property(lambda self: self.explicit.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        self.source.check_every_class_drawn()
        cumulative, order = self._proposal(hidden, len(target))
        groups, drawn = len(cumulative), self.k - self._num_explicit
        offset = torch.rand(groups, 1, dtype=torch.float64, device=target.device, generator=generator)
        position = (offset + torch.arange(drawn, dtype=torch.float64, device=target.device)).div_(drawn)
        cluster = torch.searchsorted(cumulative, position, right=True).clamp_(max=self.clusters.number - 1)
        start, mass = _interval(cumulative, cluster)
        # Clamped, so that rounding never moves a tooth into the next cluster.
        inside = ((position - start) / mass).clamp_(0.0, 1 - 1e-12)
        ids, share = self.clusters.locate(cluster + inside)
        # A class longer than the spacing is drawn for certain. Teeth ascend, so a second draw follows the first.
        log_kappa = (mass * share).mul_(drawn).log_().neg_().clamp_(min=0.0)
        log_kappa[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -math.inf)
        block = Block(ids, log_kappa, order)
        blocks: tuple[Block, ...] = (block,)
        if self._num_explicit:
            known = self.explicit.unsqueeze(0)
            blocks = (Block(known, torch.zeros(known.shape, dtype=torch.float64, device=known.device)), block)
        # The function below may be called after the clusters have been replaced.
        clusters = self.clusters
        return Candidates(
            blocks, exclude, lambda: self._log_kappa(target, clusters, cumulative, block), self.num_classes
        )

    def _proposal(self, hidden: Tensor | None, batch: int) -> tuple[Tensor, Tensor | None]:
        """Return cumulative masses of the clusters [G, J], and the order that sorts the batch into its groups."""
        if hidden is not None:
            self._build_if_stale()
        # Autocast would round the proposal, from which κ is computed.
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self._cumulative_proposal(hidden, batch)

    def _cumulative_proposal(self, hidden: Tensor | None, batch: int) -> tuple[Tensor, Tensor | None]:
        weight = self.clusters.mass / self.clusters.mass.sum()
        groups = -(-batch // self.group_size)
        if hidden is None or not self.schedule.is_attached:
            return _normalised_sum(weight.unsqueeze(0)).expand(groups, -1).contiguous(), None
        scores = hidden.detach().float() @ self.clusters.centroids.T
        p = (scores + weight.log().float()).softmax(1)
        likeliest = p.argmax(1)
        order = likeliest.argsort(stable=True)
        grouping = Block(order.new_empty(groups, 0), order.new_empty(groups, 0), order)
        # Rows that pad the last group are 0 and change only the scale.
        mass = grouping.group(p).square().sum(1).sqrt().double()
        return _normalised_sum(mass / mass.sum(1, keepdim=True) + self.mix * weight), order

    def _build_if_stale(self) -> None:
        if not is_transformed() and self.schedule.stale and self.schedule.vectors:
            self.refresh()

    def _snapshot(self) -> Callable[[], Clusters]:
        """Copy the inputs of a build, and return the function that clusters them."""
        vectors, weight = self.schedule.vectors[0].detach().clone(), self._drawn_weight()
        centroids = self.clusters.centroids
        return lambda: Clusters.of(vectors, weight, centroids)

    def _drawn_weight(self) -> Tensor:
        weight = self.source.read().to(self.device)
        weight[self.explicit] = 0.0
        return weight

    def _log_kappa(self, target: Tensor, clusters: Clusters, cumulative: Tensor, block: Block) -> Tensor:
        groups = torch.arange(len(cumulative), device=target.device).unsqueeze(1)
        group = block.spread(groups, len(target)).squeeze(1)
        _, mass = _interval(cumulative[group], clusters.cluster_of(target).unsqueeze(1))
        expected = (self.k - self._num_explicit) * mass.squeeze(1) * clusters.share(target)
        return torch.where(torch.isin(target, self.explicit), 0.0, -expected.log()).clamp(min=0.0)

    @property
    def every(self) -> int:
        """The training steps between two clusterings."""
        return self._every or default_interval(self.num_classes)

    def refresh(self) -> None:
        """Read the weights again, and cluster the class vectors."""
        self.schedule.drop()
        if self.schedule.vectors:
            with isolated():
                self.clusters = self._snapshot()()
            self.schedule.stale = False

    def resize(self, num_classes: int) -> None:
        """Resize the counts; class vectors must be attached again before they are clustered."""
        _check.integer("num_classes", num_classes, self.k)
        self.source.resize(num_classes)
        device = self.device
        self._set_up()
        self.to(device)
        self.schedule.restart()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, explicit={self._num_explicit}, group_size={self.group_size}, mix={self.mix:g}"


def _normalised_sum(mass: Tensor) -> Tensor:
    """Return cumulative sums along rows, scaled to end at exactly 1."""
    cumulative = mass.cumsum(1)
    return cumulative / cumulative[:, -1:]


def _interval(cumulative: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor]:
    """Return the starts and lengths of clusters [G, N] on the lines [G, J] of cumulative masses."""
    start = F.pad(cumulative, (1, 0)).gather(1, cluster)
    return start, cumulative.gather(1, cluster) - start
