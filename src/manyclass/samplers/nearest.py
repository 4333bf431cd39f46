"""The classes nearest to an example explicit, the rest drawn."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Block, Candidates, join
from manyclass.counts import ClassCounts
from manyclass.samplers._index import ClassIndex, load_faiss
from manyclass.samplers._renewal import Renewal
from manyclass.samplers._sampler import Upkeep, check_group_size, check_vectors, checked_draw, num_groups
from manyclass.samplers._source import WeightSource
from manyclass.samplers.systematic import Systematic


class Nearest(nn.Module):
    """k classes: those with the largest scores as an index finds them, κ = 1, and the rest by `Systematic`, κ = 1/π.

    The index holds class vectors [w, b] in lists of neighbours; the query is [hidden, 1], or its mean over a group. Of
    the lists whose centroids have the largest inner products with the query, `probes` are searched. A drawn class that
    is among the nearest is emptied, for each group by itself, so that an index that has gone stale costs variance,
    never bias. Classes of π = 1 are explicit by themselves and are not in the index. Groups draw at offsets of their
    own, so that their errors average out in the gradient. The index is built anew on a thread, from a copy of the
    class vectors, and taken up a quarter of `every` draws later.

    Without `hidden`, or before a head has shown its class vectors, the heaviest classes stand for the nearest.

    The index lives on the CPU and is searched there: with a head on a GPU, each draw copies its queries to the CPU and
    waits for what is found. It has a copy of all class vectors, in memory and in the state.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes scored for an example beside its target, the nearest included; at least 2, at most C.
        nearest: how many of them are the nearest. Default: half.
        group_size: how many similar examples share their classes; None: the batch; 1: each has its own.
        lists: their number. Default: 4√C, and at most a quarter of C.
        probes: lists searched for a group. Default: as many as hold eight times `nearest` classes on average.
        every: draws for training between two builds of the index. Default: 500, or C/64 where that is more.

    Raises:
        ImportError: faiss is not installed.
        ValueError: k above C, numbers out of range; weights negative, infinite or NaN; when drawing, 0 for a class that
            is not explicit.

    Example:
        >>> vectors = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> sampler = Nearest(torch.ones(100), k=20, nearest=3, probes=25)
        >>> sampler.follow(vectors)
        >>> candidates = sampler(torch.tensor([7]), hidden=vectors[:1])
        >>> torch.equal(candidates.ids()[0, :3], (vectors @ vectors[0]).topk(3).indices)
        True
    """

    unbiased = True
    renormalises = False
    _heaviest: Tensor

    def __init__(
        self,
        weights: Tensor | ClassCounts | WeightSource,
        k: int,
        *,
        nearest: int | None = None,
        group_size: int | None = 1,
        lists: int | None = None,
        probes: int | None = None,
        every: int | None = None,
    ) -> None:
        super().__init__()
        load_faiss()
        source = weights if isinstance(weights, WeightSource) else WeightSource(weights)
        self.k = _check.whole("k", k, 2, source.num_classes)
        self.nearest = k // 2 if nearest is None else _check.whole("nearest", nearest, 1, k - 1)
        self.group_size = check_group_size(group_size)
        self._num_lists = None if lists is None else _check.whole("lists", lists, 1, source.num_classes)
        self._probes = None if probes is None else _check.whole("probes", probes, 1)
        self._every = None if every is None else _check.whole("every", every, 1)
        self._vectors: tuple[Tensor, ...] = ()
        self.sampler = Systematic(source, k - self.nearest, group_size=group_size)
        self.index = ClassIndex()
        self.renewal: Renewal[ClassIndex] = Renewal()
        self.register_buffer("_heaviest", self._heaviest_drawn())

    def _heaviest_drawn(self) -> Tensor:
        """The heaviest classes that are not drawn for certain, as many as there are nearest ones; -1 pads."""
        weight = self.sampler.table.mass(torch.arange(self.num_classes, device=self.device))
        weight, ids = weight.topk(self.nearest)
        return ids.masked_fill_(weight == 0, -1)

    def follow(self, vectors: Tensor, bias: Tensor | None = None) -> None:
        """Index these class vectors [C, D] and biases [C], now and again every so many draws. A head shows its own."""
        check_vectors(vectors, self.num_classes)
        if bias is not None:
            _check.shape("bias", bias, (self.num_classes,))
        # In a tuple, lest the head's parameters become the sampler's too.
        self._vectors = (vectors,) if bias is None else (vectors, bias)
        self.renewal.restart()

    @property
    def num_classes(self) -> int:
        return self.sampler.num_classes

    @property
    def device(self) -> torch.device:
        return self.sampler.device

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """As a call, for arguments that have been checked."""
        found, order = self._find(hidden, target)
        rest = self.sampler.draw(target, exclude, hidden=None, generator=generator)
        # Those of π = 1 are in a block of their own where groups are several, and never among the nearest.
        *certain, drawn = rest.blocks
        known = torch.zeros(found.shape, dtype=torch.float64, device=found.device)
        blocks = join(
            Block(found.clamp(min=0), known.masked_fill_(found < 0, -math.inf), order),
            Block(drawn.ids, drawn.log_kappa.masked_fill(_within(drawn.ids, found), -math.inf), order),
        )

        def target_log_kappa() -> Tensor:
            own = _within(target.unsqueeze(1), blocks[0].spread(found, len(target))).squeeze(1)
            assert rest.target_log_kappa is not None
            return rest.target_log_kappa().masked_fill(own, 0.0)

        return Candidates((*certain, *blocks), exclude, target_log_kappa, self.num_classes)

    @torch.no_grad()
    def _find(self, hidden: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Explicit classes [G, nearest], -1 pads, and the order that sorts the batch into its groups."""
        groups = num_groups(target, self.group_size)
        if hidden is not None and self._vectors:
            self._follow_vectors()
        if hidden is None or len(self.index.centroids) == 0:
            return self._heaviest.expand(groups, -1), None
        query, order = hidden.detach().float(), None
        if query.shape[1] < self.index.centroids.shape[1]:
            query = F.pad(query, (0, 1), value=1.0)
        if groups == 1:
            query = query.mean(0, keepdim=True)
        scores = query @ self.index.centroids.T
        if 1 < groups < len(target):
            order = scores.argmax(1).argsort(stable=True)
            grouping = Block(torch.empty(groups, 0), torch.empty(groups, 0), order)
            # A sum finds what a mean does, and rows that pad the last group do not change it.
            query, scores = grouping.group(query).sum(1), grouping.group(scores).sum(1)
        number = scores.shape[1]
        probes = self._probes or math.ceil(8 * self.nearest * number / self.num_classes)
        return self.index.search(query, scores.topk(min(probes, number)).indices, self.nearest), order

    def _follow_vectors(self) -> None:
        first = self.renewal.steps == 0
        if first:
            self._build()
        # Evaluations and probes do not train, and do not make the index older.
        if first or self.training:
            self.index = self.renewal.step(self.index, self.every, self._snapshot)

    def _snapshot(self) -> Callable[[], ClassIndex]:
        """What an index follows from, copied, and how it does."""
        vectors, *bias = (x.detach() for x in self._vectors)
        vectors = torch.cat([vectors, bias[0].unsqueeze(1)], 1) if bias else vectors.clone()
        ids = torch.arange(len(vectors), device=self.device)
        ids = ids[self.sampler.table.mass(ids) > 0]
        number = self._num_lists or max(1, min(4 * math.isqrt(len(vectors)), len(vectors) // 4))
        start = self.index.centroids if self.index.centroids.shape == (number, vectors.shape[1]) else None
        return lambda: ClassIndex.of(vectors, ids, number, start)

    def _build(self) -> None:
        self.renewal.drop()
        self.index = self._snapshot()() if self._vectors else ClassIndex().to(self.device)

    def without(self, ids: Tensor) -> "Nearest":
        """The same design over all classes but these, which somebody else sums."""
        rest = Nearest(
            self.sampler.source.without(ids),
            self.k,
            nearest=self.nearest,
            group_size=self.group_size,
            lists=self._num_lists,
            probes=self._probes,
            every=self._every,
        )
        if self._vectors:
            rest.follow(*self._vectors)
        return rest

    def heaviest(self, n: int) -> Tensor:
        """The n classes that are drawn most often, in ascending order."""
        return self.sampler.heaviest(n)

    @property
    def every(self) -> int:
        """Draws for training between two builds of the index."""
        return self._every or max(500, self.num_classes // 64)

    def upkeep(self) -> Iterator[Upkeep]:
        """What is done now and then, and how often."""
        yield Upkeep(self.refresh, self.every)

    def refresh(self) -> None:
        """Rebuild the table from the counts, and the index from the class vectors."""
        self.sampler.refresh()
        self._heaviest = self._heaviest_drawn()
        self._build()

    def resize(self, num_classes: int) -> None:
        """Follow the counts to another number of classes; an index of them waits until their vectors are shown."""
        _check.whole("num_classes", num_classes, self.k)
        self.sampler.resize(num_classes)
        self._vectors = ()
        self._heaviest = self._heaviest_drawn()
        self.index = ClassIndex().to(self.device)
        self.renewal.restart()

    def extra_repr(self) -> str:
        return f"k={self.k}, nearest={self.nearest}, group_size={self.group_size}"


def _within(ids: Tensor, rows: Tensor) -> Tensor:
    """bool [G, K]: which of the ids [G, K] are in their row of [G, N]."""
    ascending = rows.sort(1).values
    place = torch.searchsorted(ascending, ids.contiguous()).clamp_(max=ascending.shape[1] - 1)
    return ascending.gather(1, place) == ids
