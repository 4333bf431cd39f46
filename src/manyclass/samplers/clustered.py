"""Groups of similar examples, each drawing its own classes where its clusters of classes are likely."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Block, Candidates
from manyclass.counts import ClassCounts
from manyclass.samplers._clusters import Clusters
from manyclass.samplers._renewal import Renewal
from manyclass.samplers._sampler import Upkeep, check_vectors, checked_draw
from manyclass.samplers._source import WeightSource


class Clustered(nn.Module):
    """k classes for each group of similar examples: the heaviest ones explicit, the rest drawn where the model looks.

    Class vectors are clustered. For an example, cluster j has the weight exp(hidden · centroid) times that of its
    classes: a model of p in √C numbers. The batch is sorted by the likeliest cluster and cut into groups; a group's
    proposal M(j) is the root of the mean square of its examples' (and a part `mix` of the weights alone). Within a
    cluster classes have their share r of its weight. A comb of unit spacing falls on the line of masses k M r, one
    random offset for each group: O(√C + k) a step, κ = 1/(k M r). Clusters that have gone stale cost variance, never
    bias; a class of k M r above 1 is drawn for certain, κ = 1, and its further slots are empty. They are learnt anew
    on a thread, from a copy of the class vectors, and taken up a quarter of `every` draws later.

    Without `hidden`, or before a head has shown its class vectors, M is the weights alone.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes scored for an example beside its target, the explicit ones included; at most C.
        explicit: how many of the heaviest classes every example sums. Default: an eighth of k.
        group_size: how many similar examples share a draw.
        clusters: their number. Default: 4√C, and at most a quarter of C.
        mix: how much of the weights alone is in the proposal.
        every: draws for training between two clusterings. Default: 500, or C/64 where that is more.

    Raises:
        ValueError: k above C, no class left to draw, weights that are not positive, or numbers out of range.

    Example:
        >>> sampler = Clustered(torch.ones(100), k=20, group_size=2)
        >>> sampler.follow(torch.randn(100, 8))
        >>> candidates = sampler(torch.arange(4), hidden=torch.randn(4, 8))
        >>> candidates.ids().shape
        torch.Size([4, 20])
    """

    unbiased = True
    renormalises = False
    _explicit: Tensor

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
        self.k = _check.whole("k", k, 1, classes)
        self.group_size = _check.whole("group_size", group_size, 1)
        self.mix = _check.number("mix", mix, low=0, strict=True)
        self._num_explicit = k // 8 if explicit is None else _check.whole("explicit", explicit, 0, k - 1)
        self._num_clusters = None if clusters is None else _check.whole("clusters", clusters, 1, classes)
        self._every = None if every is None else _check.whole("every", every, 1)
        self._vectors: tuple[Tensor, ...] = ()
        self.renewal: Renewal[Clusters] = Renewal()
        self.register_buffer("_explicit", torch.empty(0, dtype=torch.int64))
        self._set_up()

    def _set_up(self) -> None:
        weight = self.source.read()
        if self._num_explicit:
            self._explicit = weight.topk(self._num_explicit).indices.sort().values
            weight[self._explicit] = 0.0
        if not (weight > 0).any():
            raise ValueError(
                f"`explicit` must leave a class to draw, got {self._num_explicit} of {len(weight)} classes"
            )
        number = self._num_clusters or max(1, min(4 * math.isqrt(len(weight)), len(weight) // 4))
        self.clusters = Clusters(weight, number)

    def follow(self, vectors: Tensor, bias: Tensor | None = None) -> None:
        """Cluster these class vectors [C, D], now and again every so many draws. A head shows its own.

        The bias changes nothing: it is in the weights, as far as classes are frequent.
        """
        check_vectors(vectors, self.num_classes)
        # In a tuple, lest the head's parameter become the sampler's too.
        self._vectors = (vectors,)
        self.renewal.restart()

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    @property
    def device(self) -> torch.device:
        return self._explicit.device

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """As a call, for arguments that have been checked."""
        self.source.check_every_class_drawn()
        cumulative, order = self._proposal(hidden, len(target))
        groups, drawn = len(cumulative), self.k - self._num_explicit
        offset = torch.rand(groups, 1, dtype=torch.float64, device=target.device, generator=generator)
        position = (offset + torch.arange(drawn, dtype=torch.float64, device=target.device)).div_(drawn)
        cluster = torch.searchsorted(cumulative, position, right=True).clamp_(max=self.clusters.number - 1)
        start, mass = _interval(cumulative, cluster)
        # How far into its cluster a tooth falls; rounding must not take it into the next.
        inside = ((position - start) / mass).clamp_(0.0, 1 - 1e-12)
        ids, share = self.clusters.locate(cluster + inside)
        # A class longer than the gap of two teeth is drawn for certain. Teeth ascend: a second draw follows the first.
        log_kappa = (mass * share).mul_(drawn).log_().neg_().clamp_(min=0.0)
        log_kappa[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], -math.inf)
        block = Block(ids, log_kappa, order)
        blocks: tuple[Block, ...] = (block,)
        if self._num_explicit:
            known = self._explicit.unsqueeze(0)
            blocks = (Block(known, torch.zeros(known.shape, dtype=torch.float64, device=known.device)), block)
        # Asked later, there may be other clusters.
        clusters = self.clusters
        return Candidates(
            blocks, exclude, lambda: self._log_kappa(target, clusters, cumulative, block), self.num_classes
        )

    @torch.no_grad()
    def _proposal(self, hidden: Tensor | None, batch: int) -> tuple[Tensor, Tensor | None]:
        """Cumulative masses of the clusters [G, J], and the order that sorts the batch into its groups."""
        looks = hidden is not None and bool(self._vectors)
        if looks:
            self._follow_vectors()
        weight = self.clusters.mass / self.clusters.mass.sum()
        groups = -(-batch // self.group_size)
        if hidden is None or not looks:
            return _normalised_sum(weight.unsqueeze(0)).expand(groups, -1).contiguous(), None
        scores = hidden.detach().float() @ self.clusters.centroids.T
        p = (scores + weight.log().float()).softmax(1)
        likeliest = p.argmax(1)
        order = likeliest.argsort(stable=True)
        grouping = Block(torch.empty(groups, 0), torch.empty(groups, 0), order)
        # Rows that pad the last group are 0 and change nothing but the scale.
        mass = grouping.group(p).square().sum(1).sqrt().double()
        return _normalised_sum(mass / mass.sum(1, keepdim=True) + self.mix * weight), order

    def _follow_vectors(self) -> None:
        first = self.renewal.steps == 0
        if first:
            self.refresh()
        # Evaluations and probes do not train, and do not make the clusters older.
        if first or self.training:
            self.clusters = self.renewal.step(self.clusters, self.every, self._snapshot)

    def _snapshot(self) -> Callable[[], Clusters]:
        """What clusters follow from, copied, and how they do."""
        vectors, weight = self._vectors[0].detach().clone(), self._drawn_weight()
        number, centroids = self.clusters.number, self.clusters.centroids

        def build() -> Clusters:
            clusters = Clusters(weight, number, centroids=centroids)
            clusters.learn(vectors, weight)
            return clusters

        return build

    def _drawn_weight(self) -> Tensor:
        weight = self.source.read().to(self.device)
        weight[self._explicit] = 0.0
        return weight

    def _log_kappa(self, target: Tensor, clusters: Clusters, cumulative: Tensor, block: Block) -> Tensor:
        groups = torch.arange(len(cumulative), device=target.device).unsqueeze(1)
        group = block.spread(groups, len(target)).squeeze(1)
        _, mass = _interval(cumulative[group], clusters.label(target).unsqueeze(1))
        expected = (self.k - self._num_explicit) * mass.squeeze(1) * clusters.share(target)
        return torch.where(torch.isin(target, self._explicit), 0.0, -expected.log()).clamp(min=0.0)

    @property
    def every(self) -> int:
        """Draws for training between two clusterings."""
        return self._every or max(500, self.num_classes // 64)

    def upkeep(self) -> Iterator[Upkeep]:
        """What is done now and then, and how often."""
        yield Upkeep(self.refresh, self.every)

    def refresh(self) -> None:
        """Read the weights again, and cluster the class vectors anew."""
        self.renewal.drop()
        if self._vectors:
            self.clusters.learn(self._vectors[0], self._drawn_weight())

    def resize(self, num_classes: int) -> None:
        """Follow the counts to another number of classes; the next draw clusters them."""
        _check.whole("num_classes", num_classes, self.k)
        self.source.resize(num_classes)
        device = self.device
        self._set_up()
        self.to(device)
        self.renewal.restart()

    def extra_repr(self) -> str:
        return f"k={self.k}, explicit={self._num_explicit}, group_size={self.group_size}, mix={self.mix:g}"


def _normalised_sum(mass: Tensor) -> Tensor:
    """Cumulative sums along rows that end at exactly 1."""
    cumulative = mass.cumsum(1)
    return cumulative / cumulative[:, -1:]


def _interval(cumulative: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor]:
    """Where clusters [G, N] begin on the lines [G, J] of cumulative masses, and how long they are there."""
    start = F.pad(cumulative, (1, 0)).gather(1, cluster)
    return start, cumulative.gather(1, cluster) - start
