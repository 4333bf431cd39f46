"""The order in which classes lie on a sampler's line."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._loaded_state import follow_loaded_state
from manyclass.kmeans import fit_centroids, nearest_centroids
from manyclass.samplers._sampler import check_vectors

ORDERS = ("frequency", "random", "cluster")
MAX_CLUSTERS = 256  # a comb of a thousand teeth takes several classes from each: more would change nothing
CLASSES_PER_STEP = 64


class ClassOrder(nn.Module):
    """An order of C classes: as given, heaviest first, at random, or such that neighbours have similar class vectors.

    Class vectors are clustered at the first draw. Then every training step assigns the next 64 classes to their
    clusters, so that no step does much more work than others; after a pass over all classes the order changes.

    Args:
        rule: "given", "frequency", "random" or "cluster".
    """

    _label: Tensor
    _centroid_bits: Tensor

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        # The attached class vectors. In a tuple: as an attribute they would be registered as the sampler's parameter.
        self.vectors: tuple[Tensor, ...] = ()
        # Counts random orders, or training steps since class vectors were attached.
        self._count = 0
        # True until newly attached class vectors have been clustered.
        self._stale = True
        self.register_buffer("_label", torch.empty(0, dtype=torch.int16))
        # Floats are stored as integer bits: `.half()` and `.to(dtype)` convert every floating-point buffer.
        self.register_buffer("_centroid_bits", torch.empty(0, 0, dtype=torch.int32))
        follow_loaded_state(self)

    def check_size(self, num_classes: int) -> None:
        """Raise ValueError unless the clusters are those of `num_classes` classes."""
        if self._label.shape not in ((0,), (num_classes,)) or self._centroid_bits.dim() != 2:
            raise ValueError(f"the clusters of a sampler must be of {num_classes} classes, got others")

    def sort(self, weight: Tensor, current: Tensor) -> Tensor:
        """Return the ids in order for the present weights [C]; `current` is the order before a refresh or a resize."""
        if self.rule == "frequency":
            return weight.argsort(descending=True, stable=True)
        if self.rule == "random":
            self._count += 1
            generator = torch.Generator().manual_seed(self._count)
            return torch.randperm(len(weight), generator=generator).to(weight.device)
        if len(self._label) == len(weight):
            return self.sort_by_cluster()
        if len(current) != len(weight):
            # The clusters and the class vectors are those of another number of classes.
            self._label = self._label[:0]
            self._restart()
        kept = current[current < len(weight)]
        return torch.cat([kept, torch.arange(len(kept), len(weight), device=kept.device)])

    def sort_by_cluster(self) -> Tensor:
        """Return the ids cluster by cluster; neighbouring clusters are similar."""
        return self._label.argsort(stable=True)

    def attach(self, weight: Tensor, num_classes: int) -> None:
        """Cluster these class vectors [C, D], if the rule is "cluster"."""
        if self.rule != "cluster":
            return
        check_vectors(weight, None, num_classes)
        self._restart(weight)

    def _restart(self, *vectors: Tensor) -> None:
        self.vectors, self._count, self._stale = vectors, 0, True

    @torch.no_grad()
    def build_if_stale(self) -> bool:
        """Cluster newly attached class vectors. Return True if that changed the order."""
        # A compiled graph holds the tables as constants, so nothing may change them inside it.
        if not self.vectors or not self._stale or torch.compiler.is_compiling():
            return False
        self.fit_centroids()
        self._label = nearest_centroids(self.vectors[0].detach(), self._centroid_bits.view(torch.float32)).short()
        self._stale = False
        return True

    @torch.no_grad()
    def advance(self) -> bool:
        """Assign the next classes to their clusters, once for each training step. Return True if the order changed."""
        if not self.vectors or torch.compiler.is_compiling():
            return False
        if self._count == 0:
            self._count = 1
            return self.build_if_stale()
        turn = self._count % self.steps_per_pass
        if turn == 0:
            self.fit_centroids()
        rows = slice(turn * CLASSES_PER_STEP, (turn + 1) * CLASSES_PER_STEP)
        centroids = self._centroid_bits.view(torch.float32)
        self._label[rows] = nearest_centroids(self.vectors[0].detach()[rows], centroids).short()
        self._count += 1
        return turn == self.steps_per_pass - 1

    @property
    def steps_per_pass(self) -> int:
        """The training steps in which all classes are assigned to clusters."""
        return -(-len(self.vectors[0]) // CLASSES_PER_STEP)

    def fit_centroids(self) -> None:
        """Fit the centroids to the class vectors, starting from the current ones."""
        vectors = self.vectors[0].detach()
        number = min(MAX_CLUSTERS, math.isqrt(len(vectors)))
        known = self._centroid_bits.view(torch.float32)
        start = known if known.shape == (number, vectors.shape[1]) and not self._stale else None
        self._centroid_bits = fit_centroids(vectors, number, start).view(torch.int32)

    def get_extra_state(self) -> Tensor:
        """Return the count, which decides the next random order or the next classes to assign, and staleness."""
        return torch.tensor([self._count, self._stale])

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved state; raise ValueError unless it is a count in [0, 2⁵³) and a flag."""
        if state.shape != (2,) or not 0 <= int(state[0]) < 1 << 53:
            raise ValueError(f"the order of a sampler must hold a count of steps and a flag, got {state.tolist()}")
        self._count, self._stale = int(state[0]), bool(state[1])

    def extra_repr(self) -> str:
        """Return the rule."""
        return self.rule


def first_order(order: str | Tensor, num_classes: int) -> Tensor:
    """Return int64 [C], the permutation given or the ids in ascending order; raise ValueError if it is neither."""
    if isinstance(order, str):
        _check.choice("order", order, ORDERS)
        return torch.arange(num_classes)
    ids = _check.ids("order", order, num_classes)
    _check.shape("order", ids, (num_classes,))
    in_order, position = ids.sort(stable=True)
    repeated = in_order[1:] == in_order[:-1]
    if repeated.any():
        first = int(repeated.nonzero()[0])
        raise ValueError(
            f"`order` must not repeat a class, got {in_order[first]} at position {position[first + 1]} again"
        )
    return ids
