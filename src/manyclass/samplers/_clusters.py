"""Clusters of class vectors, and a line on which each cluster has length 1."""

import copy

import torch
from torch import Tensor

from manyclass._plain_state import index_dtype, saved_vector
from manyclass.kmeans import fit_centroids, nearest_centroids

MAX_CENTROID = 1e12  # of a loaded state; squares and products with an example must be finite


class Clusters:
    """J clusters of C classes: centroids [J, D], and the classes cluster by cluster on a line of length J.

    A cluster has length 1, and a class in it the length of its share of the cluster's weight. Clusters are numbered
    along the direction in which centroids differ most, so that neighbouring clusters are similar. They never change.

    Args:
        labels: int32 [C], the cluster of each class.
        weight: float64 [C], 0 for classes that are never drawn.
        centroids: float32 [J, D]; D is 0 before class vectors are attached, and all are 0 before they are clustered.
    """

    def __init__(self, labels: Tensor, weight: Tensor, centroids: Tensor) -> None:
        self.labels, self.weights, self.centroids = labels, weight, centroids
        order = labels.argsort(stable=True)
        label, weight = labels[order].long(), weight[order]
        # float64 [J]: the weight of each cluster.
        self.mass = torch.zeros(self.number, dtype=torch.float64, device=weight.device).index_add_(0, label, weight)
        # The cumulative sum within each cluster is divided by its last entry, so a cluster ends exactly at its number.
        total = weight.cumsum(0)
        last = torch.searchsorted(label, torch.arange(self.number, device=label.device), right=True)
        ends = torch.cat([total.new_zeros(1), total])[last]
        start = torch.cat([ends.new_zeros(1), ends[:-1]])
        span = (ends - start).clamp(min=torch.finfo(torch.float64).tiny)
        cumulative = label + ((total - start[label]) / span[label]).clamp_(max=1.0)
        self._sorted = order.to(index_dtype(len(order)))
        self._place = torch.empty_like(self._sorted)
        self._place[order] = torch.arange(len(order), dtype=self._place.dtype, device=order.device)
        self._cumulative = torch.cat([cumulative.new_zeros(1), cumulative])

    @classmethod
    def by_id(cls, weight: Tensor, number: int) -> "Clusters":
        """Return clusters of neighbouring ids, for use until there are class vectors."""
        labels = torch.arange(len(weight), device=weight.device) * number // max(len(weight), 1)
        return cls(labels.int(), weight, torch.zeros(number, 0, device=weight.device))

    def with_centroids(self, centroids: Tensor) -> "Clusters":
        """Return the same clusters with other centroids [J, D]."""
        changed = copy.copy(self)
        changed.centroids = centroids
        return changed

    @classmethod
    def of(cls, vectors: Tensor, weight: Tensor, centroids: Tensor) -> "Clusters":
        """Cluster class vectors [C, D], starting from these centroids [J, D] unless all are 0."""
        centroids = fit_centroids(vectors, len(centroids), centroids if centroids.any() else None)
        return cls(nearest_centroids(vectors, centroids).int(), weight, centroids)

    @classmethod
    def restored(
        cls, labels: Tensor, weights: Tensor, centroids: Tensor, *, num_classes: int, number: int
    ) -> "Clusters":
        """Return the clusters of a saved state; raise ValueError unless they are `number` clusters of C classes."""
        saved_vector("labels", labels, torch.int32, num_classes)
        saved_vector("weights", weights, torch.float64, num_classes)
        if not 0 < float(weights.sum()) < 1e300:
            raise ValueError(f"`weights` must have a finite sum above 0, got {float(weights.sum()):g}")
        if centroids.dtype != torch.float32 or centroids.dim() != 2 or len(centroids) != number:
            raise ValueError(f"`centroids` must be float32 [{number}, D], got {list(centroids.shape)}")
        if not bool((centroids.abs() <= MAX_CENTROID).all()):
            raise ValueError(f"`centroids` must lie within ±{MAX_CENTROID:g}, got others")
        if int(labels.max()) >= number:
            raise ValueError(f"`labels` must be below {number}, got {int(labels.max())}")
        return cls(labels, weights, centroids)

    @property
    def number(self) -> int:
        """The number of clusters J."""
        return len(self.centroids)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.labels.device

    def to(self, device: torch.device) -> "Clusters":
        """Return the same clusters on a device."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, value.to(device))
        return moved

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and shares of the classes at positions on the line, float64 of any shape in [0, J)."""
        place = torch.searchsorted(self._cumulative, position.contiguous(), right=True).sub_(1)
        place = place.clamp_(0, len(self._cumulative) - 2)
        return self._sorted[place].long(), self._share(place)

    def share(self, ids: Tensor) -> Tensor:
        """Return the share of each class in the weight of its cluster."""
        return self._share(self._place[ids].long())

    def cluster_of(self, ids: Tensor) -> Tensor:
        """Return the cluster of each class."""
        return self.labels[ids].long()

    def _share(self, place: Tensor) -> Tensor:
        cumulative = self._cumulative
        # Cluster j begins at j. The class before it ends earlier if there are empty clusters between them.
        return cumulative[place + 1] - torch.maximum(cumulative[place], cumulative[place + 1].ceil() - 1)
