"""The order in which classes lie on a sampler's line."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import is_transformed, isolated
from manyclass._plain_state import has_values, load_state, move_state, save_state, saved_progress, saved_vector
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
        num_classes: C.
    """

    saved = ("labels", "centroids", "progress")
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(self, rule: str, num_classes: int) -> None:
        super().__init__()
        self.rule = rule
        self.num_classes = num_classes
        # In a tuple: as an attribute the class vectors would be registered as the sampler's parameter.
        self._vectors: tuple[Tensor, ...] = ()
        # Counts random orders, or training steps since class vectors were attached.
        self._count = 0
        # True until newly attached class vectors have been clustered.
        self._stale = True
        # int16 [C]: the cluster of each class; [0] under other rules.
        self.labels = torch.zeros(num_classes if rule == "cluster" else 0, dtype=torch.int16, device="cpu")
        # float32 [J, D]; D is 0 before class vectors are attached.
        self.centroids = torch.zeros(self._num_clusters(), 0, device="cpu")

    device = property(lambda self: self.labels.device)

    def move(self, device: torch.device) -> None:
        """Move the clusters to a device."""
        self.labels, self.centroids = self.labels.to(device), self.centroids.to(device)

    @property
    def progress(self) -> Tensor:
        """int64 [2]: the count, which decides the next random order or the next classes to assign, and staleness."""
        return torch.tensor([self._count, self._stale], device="cpu")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved clusters; raise ValueError unless they are clusters of as many classes."""
        labels, centroids = state["labels"], state["centroids"]
        count, stale = saved_progress(state["progress"])
        saved_vector("labels", labels, torch.int16, len(self.labels))
        number = len(self.centroids)
        if centroids.dtype != torch.float32 or centroids.dim() != 2 or len(centroids) != number:
            raise ValueError(
                f"`centroids` must be float32 [{number}, D], got {centroids.dtype} {list(centroids.shape)}"
            )
        if not bool(centroids.isfinite().all()):
            raise ValueError("`centroids` must be finite, got an infinite number or NaN")
        if number and int(labels.max()) >= number:
            raise ValueError(f"`labels` must be below {number}, got {int(labels.max())}")
        if self._vectors and centroids.shape[1] != self._vectors[0].shape[1]:
            raise ValueError(f"`centroids` must have length {self._vectors[0].shape[1]}, got {centroids.shape[1]}")
        self._count, self._stale = count, stale
        self.labels, self.centroids = labels, centroids

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The attached class vectors; none while they have no values."""
        return self._vectors if all(map(has_values, self._vectors)) else ()

    def __getstate__(self) -> dict[str, Any]:
        # Vectors without values cannot be copied; they are attached again.
        return {**self.__dict__, "_vectors": self.vectors}

    def sort(self, weight: Tensor, current: Tensor) -> Tensor:
        """Return the ids in order for the present weights [C]; `current` is the order before a refresh or a resize."""
        if self.rule == "frequency":
            return weight.argsort(descending=True, stable=True)
        if self.rule == "random":
            self._count += 1
            generator = torch.Generator().manual_seed(self._count)
            return torch.randperm(len(weight), generator=generator, device="cpu").to(weight.device)
        if len(current) != len(weight):
            # The clusters and the class vectors are those of another number of classes.
            self.num_classes = len(weight)
            self._restart()
        if self.rule == "cluster" and not self._stale:
            return self.sort_by_cluster()
        kept = current[current < len(weight)]
        return torch.cat([kept, torch.arange(len(kept), len(weight), device=kept.device)])

    def sort_by_cluster(self) -> Tensor:
        """Return the ids cluster by cluster; neighbouring clusters are similar."""
        return self.labels.argsort(stable=True)

    def attach(self, weight: Tensor, num_classes: int) -> None:
        """Cluster these class vectors [C, D], if the rule is "cluster"; those of another shape start from the first."""
        if self.rule != "cluster":
            return
        check_vectors(weight, None, num_classes)
        if self.centroids.shape[1] != weight.shape[1]:
            self._restart(weight.shape[1])
        self._vectors = (weight,)

    def _restart(self, dim: int = 0) -> None:
        self._vectors, self._count, self._stale = (), 0, True
        if self.rule == "cluster":
            self.labels = self.labels.new_zeros(self.num_classes)
            self.centroids = self.centroids.new_zeros(self._num_clusters(), dim)

    def _num_clusters(self) -> int:
        return min(MAX_CLUSTERS, math.isqrt(self.num_classes)) if self.rule == "cluster" else 0

    @property
    def is_stale(self) -> bool:
        """True if `build_if_stale` would cluster newly attached class vectors."""
        return self._stale and bool(self.vectors)

    def is_settled(self, steps: int) -> bool:
        """Return True if none of the next training steps changes the order after the advance of the first."""
        if self.is_stale:
            return False
        if not self.vectors:
            return True
        last = self.steps_per_pass
        return all((self._count + i) % last != last - 1 for i in range(1, steps))

    def build_if_stale(self) -> bool:
        """Cluster newly attached class vectors. Return True if that changed the order."""
        if is_transformed() or not self.is_stale:
            return False
        with isolated():
            self.fit_centroids()
            self.labels = nearest_centroids(self.vectors[0].detach(), self.centroids).short()
        self._stale = False
        return True

    def advance(self) -> bool:
        """Assign the next classes to their clusters, once for each training step. Return True if the order changed."""
        if not self.vectors:
            return False
        if self._count == 0 or self._stale:
            self._count = max(self._count, 1)
            return self.build_if_stale()
        turn = self._count % self.steps_per_pass
        with isolated():
            if turn == 0:
                self.fit_centroids()
            rows = slice(turn * CLASSES_PER_STEP, (turn + 1) * CLASSES_PER_STEP)
            self.labels[rows] = nearest_centroids(self.vectors[0].detach()[rows], self.centroids).short()
        self._count += 1
        return turn == self.steps_per_pass - 1

    @property
    def steps_per_pass(self) -> int:
        """The training steps in which all classes are assigned to clusters."""
        return -(-len(self.vectors[0]) // CLASSES_PER_STEP)

    def fit_centroids(self) -> None:
        """Fit the centroids to the class vectors, starting from the current ones."""
        vectors = self.vectors[0].detach()
        self.centroids = fit_centroids(vectors, len(self.centroids), None if self._stale else self.centroids)

    def extra_repr(self) -> str:
        """Return the rule."""
        return self.rule


def first_line(order: str | Tensor | None, weight: Tensor) -> tuple[ClassOrder | None, Tensor | None]:
    """Return the rule of an `order` argument, and the ids in their first order; None: by id.

    Raises:
        ValueError: it is neither the name of a rule nor a permutation of the ids.
    """
    if order is None:
        return None, None
    rule = ClassOrder(order if isinstance(order, str) else "given", len(weight))
    return rule, rule.sort(weight, _first_ids(order, len(weight)).to(weight.device))


def _first_ids(order: str | Tensor, num_classes: int) -> Tensor:
    """Return int64 [C], the permutation given or the ids in ascending order; raise ValueError if it is neither."""
    if isinstance(order, str):
        _check.choice("order", order, ORDERS)
        return torch.arange(num_classes, device="cpu")
    ids = _check.ids("order", _check.values("order", order), num_classes)
    _check.shape("order", ids, (num_classes,))
    in_order, position = ids.sort(stable=True)
    repeated = in_order[1:] == in_order[:-1]
    if repeated.any():
        first = int(repeated.nonzero()[0])
        raise ValueError(
            f"`order` must not repeat a class, got {in_order[first]} at position {position[first + 1]} again"
        )
    return ids
