"""An explicit sum over the classes nearest to an example, and a draw of the rest."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import is_transformed, isolated
from manyclass._faiss import load_faiss
from manyclass._handle import Handle, owner_of
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass.candidates import Block, Candidates, join
from manyclass.counts import ClassCounts
from manyclass.samplers._index import ClassIndex
from manyclass.samplers._rebuild import BackgroundRebuild, default_interval
from manyclass.samplers._sampler import check_group_size, check_vectors, checked_draw, no_learning, num_groups
from manyclass.samplers._source import WeightSource
from manyclass.samplers.systematic import Systematic


class Nearest(nn.Module):
    """k classes: those of the largest scores, found by an index, κ = 1, and the rest by `Systematic`, κ = 1/π.

    The index holds class vectors [w, b] in lists of neighbours; the query is [hidden, 1], or its mean over a group. It
    searches the `probes` lists whose centroids have the largest inner products with the query. Within each group, a
    drawn class that is among the nearest becomes an empty slot, so that a stale index costs variance, never bias.
    Classes of π = 1 are in every draw and not in the index. Each group draws at a separate random offset, so that
    errors average out in the gradient. The index is rebuilt on a background thread from a copy of the class vectors,
    and used a quarter of `every` steps later.

    Without `hidden`, or before class vectors are attached, the heaviest classes take the place of the nearest.

    The index is on the CPU: with a head on a GPU, each draw copies its queries to the CPU and waits for the result. It
    holds a copy of all class vectors; the state dict has room for two, one for the rebuild in progress.

    Args:
        weights: C positive numbers or ClassCounts.
        k: classes scored for an example in addition to its target, the nearest included; at least 2, at most C.
        nearest: the number of nearest classes among them. Default: half.
        group_size: the number of similar examples that share their classes; None: the whole batch.
        lists: the number of lists in the index. Default: 4√C, and at most a quarter of C.
        probes: lists searched for a group. Default: as many as hold eight times `nearest` classes on average.
        every: training steps between two builds of the index. Default: the larger of 500 and C/64.

    Raises:
        ImportError: faiss is not installed.
        ValueError: k is above C; another number is out of range; a weight is negative, infinite or NaN, or, when
            drawing, 0 for a class that is not explicit.

    Example:
        >>> vectors = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
        >>> sampler = Nearest(torch.ones(100), k=20, nearest=3, probes=25)
        >>> sampler.attach(vectors)
        >>> candidates = sampler(torch.tensor([7]), hidden=vectors[:1])
        >>> torch.equal(candidates.ids()[0, :3], (vectors @ vectors[0]).topk(3).indices)
        True
    """

    unbiased = True
    renormalises = False
    learns = False
    observe = no_learning
    saved = (
        "heaviest_drawn",
        "centroids",
        "vectors",
        "indexed",
        "progress",
        "pending_centroids",
        "pending_vectors",
        "pending_indexed",
    )
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

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
        load_faiss("`Nearest`")
        source = weights if isinstance(weights, WeightSource) else WeightSource(weights)
        self.k = _check.integer("k", k, 2, source.num_classes)
        self.nearest = k // 2 if nearest is None else _check.integer("nearest", nearest, 1, k - 1)
        self.group_size = check_group_size(group_size)
        self._num_lists = None if lists is None else _check.integer("lists", lists, 1, source.num_classes)
        self._probes = None if probes is None else _check.integer("probes", probes, 1)
        self._every = None if every is None else _check.integer("every", every, 1)
        self.sampler = Systematic(source, k - self.nearest, group_size=group_size)
        self.index = self._empty_index(self.sampler.device)
        self.schedule: BackgroundRebuild[ClassIndex] = BackgroundRebuild()
        self.heaviest_drawn = self._heaviest_drawn()
        self._handle = Handle(self)

    def _heaviest_drawn(self) -> Tensor:
        """Return the heaviest classes that are not drawn for certain, as many as there are nearest ones; -1 pads."""
        weight, ids = self.sampler.comb.table.masses().topk(self.nearest)
        return ids.masked_fill_(weight == 0, -1)

    def _empty_index(self, device: torch.device, dim: int = 0) -> ClassIndex:
        """Return an index of no classes with vectors of length D."""
        classes = self.num_classes
        number = self._num_lists or max(1, min(4 * math.isqrt(classes), classes // 4))
        return ClassIndex.empty(classes, number, dim, device)

    centroids = property(lambda self: self.index.centroids)
    vectors = property(lambda self: self.index.contents()[0])
    indexed = property(lambda self: self.index.contents()[1])
    progress = property(lambda self: self.schedule.progress)
    pending_centroids = property(lambda self: self._pending().centroids)
    pending_vectors = property(lambda self: self._pending().contents()[0])
    pending_indexed = property(lambda self: self._pending().contents()[1])

    def _pending(self) -> ClassIndex:
        """Return the index of the rebuild in progress; an empty one if there is none."""
        pending = self.schedule.pending()
        return self._empty_index(self.device, self.centroids.shape[1]) if pending is None else pending

    def move(self, device: torch.device) -> None:
        """Move the centroids to a device; the lists stay on the CPU."""
        self.index, self.heaviest_drawn = self.index.to(device), self.heaviest_drawn.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Index the saved copies of class vectors."""
        heaviest = saved_vector("heaviest_drawn", state["heaviest_drawn"], torch.int64, self.nearest, low=-1)
        if int(heaviest.max()) >= self.num_classes:
            raise ValueError(f"`heaviest_drawn` must be below {self.num_classes}, got {int(heaviest.max())}")
        if len(some := heaviest[heaviest >= 0]) != len(some.unique()):
            raise ValueError("`heaviest_drawn` must be distinct classes, got one twice")
        index, pending = self._restored(state, ""), None
        if state["pending_indexed"].any():
            pending = self._restored(state, "pending_")
        self.schedule.restore(state["progress"], pending)
        self.index, self.heaviest_drawn = index, heaviest

    def _restored(self, state: Mapping[str, Tensor], prefix: str) -> ClassIndex:
        centroids, vectors, indexed = (state[prefix + name] for name in ("centroids", "vectors", "indexed"))
        return ClassIndex.restored(centroids, vectors, indexed, self.index)

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Index these class vectors [C, D] and biases [C], at the next draw and then every few training steps."""
        check_vectors(weight, bias, self.num_classes)
        self.schedule.attach(*(x for x in (weight, bias) if x is not None))
        dim = weight.shape[1] + (bias is not None)
        if self.centroids.shape[1] != dim:
            self.index = self._empty_index(self.device, dim)

    def advance(self) -> None:
        """Count a training step: the index follows the class vectors."""
        if self.schedule.vectors:
            self._build_if_stale()
            self.index = self.schedule.advance(self.index, self.every, self._snapshot)

    num_classes = property(lambda self: self.sampler.num_classes)
    device = property(lambda self: self.index.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        found, order = self._find(hidden, target)
        rest = self.sampler.draw(target, exclude, hidden=None, generator=generator)
        # With several groups, classes of π = 1 are in a separate block; they are never among the nearest.
        *certain, drawn = rest.blocks
        known = torch.zeros(found.shape, dtype=torch.float64, device=found.device)
        blocks = join(
            Block(found.clamp(min=0), known.masked_fill_(found < 0, -math.inf), order),
            Block(drawn.ids, drawn.log_kappa.masked_fill(_within(drawn.ids, found), -math.inf), order),
        )

        def target_log_kappa() -> Tensor:
            is_nearest = _within(target.unsqueeze(1), blocks[0].spread(found, len(target))).squeeze(1)
            assert rest.target_log_kappa is not None
            return rest.target_log_kappa().masked_fill(is_nearest, 0.0)

        return Candidates((*certain, *blocks), exclude, target_log_kappa, self.num_classes)

    def _find(self, hidden: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return explicit classes [G, nearest], -1 pads, and the order that sorts the batch into its groups."""
        groups = num_groups(target, self.group_size)
        if hidden is not None:
            self._build_if_stale()
        if hidden is None or self.index.is_empty:
            return self.heaviest_drawn.expand(groups, -1), None
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            return self._find_near(hidden, groups)

    def _find_near(self, hidden: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
        query, order = hidden.detach().float(), None
        if query.shape[1] < self.index.centroids.shape[1]:
            query = F.pad(query, (0, 1), value=1.0)
        if groups == 1:
            query = query.mean(0, keepdim=True)
        scores = query @ self.index.centroids.T
        if 1 < groups < len(hidden):
            order = scores.argmax(1).argsort(stable=True)
            grouping = Block(order.new_empty(groups, 0), order.new_empty(groups, 0), order)
            # A sum ranks as a mean does, and rows that pad the last group do not change it.
            query, scores = grouping.group(query).sum(1), grouping.group(scores).sum(1)
        number = scores.shape[1]
        probes = self._probes or math.ceil(8 * self.nearest * number / self.num_classes)
        lists = scores.topk(min(probes, number)).indices
        if is_transformed():
            return search_index(query, lists, self.nearest, self._handle.number), order
        return self.index.search(query, lists, self.nearest), order

    def _build_if_stale(self) -> None:
        if not is_transformed() and self.schedule.stale and self.schedule.vectors:
            self._build()

    def _snapshot(self) -> Callable[[], ClassIndex]:
        """Copy the inputs of a build, and return the function that indexes them."""
        vectors, *bias = (x.detach() for x in self.schedule.vectors)
        vectors = torch.cat([vectors, bias[0].unsqueeze(1)], 1) if bias else vectors.clone()
        indexed, number = self.sampler.comb.table.masses() > 0, len(self.centroids)
        start = None if self.index.is_empty else self.centroids
        return lambda: ClassIndex.of(vectors, indexed, number, start)

    def _build(self) -> None:
        self.schedule.drop()
        with isolated():
            self.index = self._snapshot()() if self.schedule.vectors else self._empty_index(self.device)
        self.schedule.stale = not self.schedule.vectors

    def without(self, ids: Tensor) -> "Nearest":
        """Return the same design over all classes but these, which are summed elsewhere."""
        rest = Nearest(
            self.sampler.source.without(ids),
            self.k,
            nearest=self.nearest,
            group_size=self.group_size,
            lists=self._num_lists,
            probes=self._probes,
            every=self._every,
        )
        if self.schedule.vectors:
            rest.attach(*self.schedule.vectors)
        return rest

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that are drawn most often, in ascending order."""
        return self.sampler.heaviest(n)

    @property
    def every(self) -> int:
        """The training steps between two builds of the index."""
        return self._every or default_interval(self.num_classes)

    def refresh(self) -> None:
        """Rebuild the table from the counts, and the index from the class vectors."""
        self.sampler.refresh()
        self.heaviest_drawn = self._heaviest_drawn()
        self._build()

    def resize(self, num_classes: int) -> None:
        """Resize the counts; class vectors must be attached again before there is an index of them."""
        _check.integer("num_classes", num_classes, self.k)
        self.sampler.resize(num_classes)
        self.heaviest_drawn = self._heaviest_drawn()
        self.index = self._empty_index(self.device)
        self.schedule.restart()

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"k={self.k}, nearest={self.nearest}, group_size={self.group_size}"


def _within(ids: Tensor, rows: Tensor) -> Tensor:
    """Return bool [G, K]: True for the ids [G, K] that are in their row of [G, N]."""
    ascending = rows.sort(1).values
    place = torch.searchsorted(ascending, ids.contiguous()).clamp_(max=ascending.shape[1] - 1)
    return ascending.gather(1, place) == ids


@torch.library.custom_op("manyclass::search_index", mutates_args=())
def search_index(query: Tensor, lists: Tensor, n: int, handle: int) -> Tensor:
    """Search the index of the sampler with this handle: faiss cannot be part of a compiled graph."""
    found: Tensor = owner_of(handle).index.search(query, lists, n)
    return found


@search_index.register_fake
def _(query: Tensor, lists: Tensor, n: int, handle: int) -> Tensor:
    return lists.new_empty(query.shape[0], n)
