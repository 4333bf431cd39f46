"""Clusters of class vectors, and a line on which each cluster has length 1."""

import torch
from torch import Tensor, nn

from manyclass._loaded_state import follow_loaded_state
from manyclass.kmeans import fit_centroids, nearest_centroids


class Clusters(nn.Module):
    """J clusters of C classes: centroids [J, D], and the classes cluster by cluster on a line of length J.

    A cluster has length 1, and a class in it the length of its share of the cluster's weight. Clusters are numbered
    along the direction in which centroids differ most, so that neighbouring clusters are similar.

    Args:
        weight: float64 [C], above 0.
        number: J.
        centroids: float32 [J, D] of an earlier clustering, to start from; None: start from some of the vectors.
    """

    _centroid_bits: Tensor
    _label: Tensor
    _place: Tensor
    _sorted: Tensor
    _cumulative_bits: Tensor
    _mass_bits: Tensor

    def __init__(self, weight: Tensor, number: int, *, centroids: Tensor | None = None) -> None:
        super().__init__()
        self.number = number
        # Floats are stored as integer bits: `.half()` and `.to(dtype)` convert every floating-point buffer.
        centroids = torch.empty(number, 0) if centroids is None else centroids
        self.register_buffer("_centroid_bits", centroids.view(torch.int32))
        for name in ("_label", "_place", "_sorted", "_cumulative_bits", "_mass_bits"):
            self.register_buffer(name, torch.empty(0, dtype=torch.int64))
        follow_loaded_state(self)
        # Until there are class vectors, classes are cut into clusters by id.
        label = torch.arange(len(weight), device=weight.device) * number // len(weight)
        self._arrange(label, weight)

    @property
    def centroids(self) -> Tensor:
        """float32 [J, D]; D is 0 until class vectors have been clustered."""
        return self._centroid_bits.view(torch.float32)

    @property
    def mass(self) -> Tensor:
        """float64 [J]: the weight of each cluster."""
        return self._mass_bits.view(torch.float64)

    @torch.no_grad()
    def fit(self, vectors: Tensor, weight: Tensor) -> None:
        """Cluster class vectors [C, D], starting from the current centroids if there are any."""
        vectors = vectors.detach()
        start = self.centroids if self.centroids.shape[1] == vectors.shape[1] else None
        centroids = fit_centroids(vectors, self.number, start)
        label = nearest_centroids(vectors, centroids)
        self._centroid_bits = centroids.view(torch.int32)
        self._arrange(label, weight)

    def _arrange(self, label: Tensor, weight: Tensor) -> None:
        order = label.argsort(stable=True)
        label, weight = label[order], weight[order]
        mass = torch.zeros(self.number, dtype=torch.float64, device=weight.device).index_add_(0, label, weight)
        # The cumulative sum within each cluster is divided by its last entry, so a cluster ends exactly at its number.
        total = weight.cumsum(0)
        last = torch.searchsorted(label, torch.arange(self.number, device=label.device), right=True)
        ends = torch.cat([total.new_zeros(1), total])[last]
        start = torch.cat([ends.new_zeros(1), ends[:-1]])
        span = (ends - start).clamp(min=torch.finfo(torch.float64).tiny)
        cumulative = label + ((total - start[label]) / span[label]).clamp_(max=1.0)
        self._label, self._sorted = torch.empty_like(label), order
        self._label[order] = label
        self._place = torch.empty_like(order)
        self._place[order] = torch.arange(len(order), device=order.device)
        self._cumulative_bits = torch.cat([cumulative.new_zeros(1), cumulative]).view(torch.int64)
        self._mass_bits = mass.view(torch.int64)

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and shares of the classes at positions on the line, float64 of any shape in [0, J)."""
        cumulative = self._cumulative_bits.view(torch.float64)
        place = torch.searchsorted(cumulative, position.contiguous(), right=True).sub_(1)
        place = place.clamp_(0, len(cumulative) - 2)
        return self._sorted[place], self._share(place)

    def share(self, ids: Tensor) -> Tensor:
        """Return the share of each class in the weight of its cluster."""
        return self._share(self._place[ids])

    def cluster_of(self, ids: Tensor) -> Tensor:
        """Return the cluster of each class."""
        return self._label[ids]

    def _share(self, place: Tensor) -> Tensor:
        cumulative = self._cumulative_bits.view(torch.float64)
        # Cluster j begins at j. The class before it ends earlier if there are empty clusters between them.
        return cumulative[place + 1] - torch.maximum(cumulative[place], cumulative[place + 1].ceil() - 1)
