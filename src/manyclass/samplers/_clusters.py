"""Clusters of class vectors, and classes on a line on which each cluster is 1 long."""

import math

import torch
from torch import Tensor, nn

from manyclass._derived import follow_loaded_state

_SAMPLE = 64  # rows a centroid is learnt from, on average
_ROUNDS = 8
_ELEMENTS = 1 << 25  # scores held at once
_MANY = 2048  # centroids from which on not all are looked at
_GROUPS = 4  # of centroids that a row looks at


class Clusters(nn.Module):
    """J clusters of C classes: centroids [J, D], and the classes cluster by cluster on a line of length J.

    A class owns the part of its cluster's unit that is its share of the cluster's weight. Clusters are numbered along
    the direction in which centroids differ most, so that neighbours are alike.

    Args:
        weight: float64 [C], above 0.
        number: J.
        centroids: float32 [J, D], where to learn from; None: from some of the vectors.
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
        # As integers the bits of floats are safe from `.half()` and `.to(dtype)`, which convert every floating buffer.
        centroids = torch.empty(number, 0) if centroids is None else centroids
        self.register_buffer("_centroid_bits", centroids.view(torch.int32))
        for name in ("_label", "_place", "_sorted", "_cumulative_bits", "_mass_bits"):
            self.register_buffer(name, torch.empty(0, dtype=torch.int64))
        follow_loaded_state(self)
        # Until there are vectors to learn from, any clusters will do.
        label = torch.arange(len(weight), device=weight.device) * number // len(weight)
        self._arrange(label, weight)

    def derive(self) -> None:
        """Nothing follows from what was loaded but what was loaded."""

    @property
    def centroids(self) -> Tensor:
        """float32 [J, D]; D is 0 until there were vectors to learn from."""
        return self._centroid_bits.view(torch.float32)

    @property
    def mass(self) -> Tensor:
        """float64 [J]: the weight of each cluster."""
        return self._mass_bits.view(torch.float64)

    @torch.no_grad()
    def learn(self, vectors: Tensor, weight: Tensor) -> None:
        """Cluster class vectors [C, D] anew, from where the centroids are; `weight` as at first."""
        vectors = vectors.detach()
        start = self.centroids if self.centroids.shape[1] == vectors.shape[1] else None
        centroids = learn_centroids(vectors, self.number, start)
        label = nearest(vectors, centroids)
        self._centroid_bits = centroids.view(torch.int32)
        self._arrange(label, weight)

    def _arrange(self, label: Tensor, weight: Tensor) -> None:
        order = label.argsort(stable=True)
        label, weight = label[order], weight[order]
        mass = torch.zeros(self.number, dtype=torch.float64, device=weight.device).index_add_(0, label, weight)
        # The cumulative sum within each cluster, divided by its last entry: a cluster ends exactly at its number.
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
        """Ids and shares of the classes at positions on the line, float64 of any shape in [0, J)."""
        cumulative = self._cumulative_bits.view(torch.float64)
        place = torch.searchsorted(cumulative, position.contiguous(), right=True).sub_(1)
        place = place.clamp_(0, len(cumulative) - 2)
        return self._sorted[place], self._share(place)

    def share(self, ids: Tensor) -> Tensor:
        """What part of its cluster's weight each class has."""
        return self._share(self._place[ids])

    def label(self, ids: Tensor) -> Tensor:
        """The clusters of classes."""
        return self._label[ids]

    def _share(self, place: Tensor) -> Tensor:
        cumulative = self._cumulative_bits.view(torch.float64)
        # A cluster's first class begins at the cluster's number, where the one before it ends.
        return cumulative[place + 1] - torch.maximum(cumulative[place], cumulative[place + 1].ceil() - 1)


@torch.no_grad()
def learn_centroids(vectors: Tensor, number: int, start: Tensor | None = None) -> Tensor:
    """float32 [J, D]: centroids of vectors [N, D], learnt from a sample of them, along the direction they differ most.

    Args:
        vectors: at least one.
        number: J.
        start: centroids that were learnt before, of vectors that have moved a little since.
    """
    # Always the same ones: a draw follows from the generator it is given and from nothing else that is random.
    chosen = torch.randint(len(vectors), (_SAMPLE * number,), generator=torch.Generator().manual_seed(0))
    rows = vectors[chosen.to(vectors.device)].float()
    centroids = rows[:number].clone() if start is None else start
    for turn in range(_ROUNDS if start is None else 2):
        label = nearest(rows, centroids)
        total = torch.zeros_like(centroids).index_add_(0, label, rows)
        count = torch.bincount(label, minlength=number).unsqueeze(1)
        # A cluster that nobody is in begins anew at some row.
        elsewhere = rows.roll(-(turn + 1) * number, 0)[:number]
        centroids = torch.where(count > 0, total / count.clamp(min=1), elsewhere)
    centred = centroids - centroids.mean(0)
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    return centroids[(centred @ direction).argsort()].contiguous()


def nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """The centroid at the least distance of each row, in chunks that fit into memory.

    Among very many, one that is about as near: only those of the nearest groups of centroids are looked at. Which
    cluster a class is in costs variance at most, and looking at all of 4√C centroids for C classes costs minutes.
    """
    if len(centroids) > _MANY:
        return _nearest_in_groups(rows, centroids)
    half = centroids.square().sum(1) / 2
    parts = rows.split(max(1, _ELEMENTS // len(centroids)))
    return torch.cat([(part.float() @ centroids.T - half).argmax(1) for part in parts])


def _nearest_in_groups(rows: Tensor, centroids: Tensor) -> Tensor:
    groups = learn_centroids(centroids, math.isqrt(len(centroids)))
    group_of = nearest(centroids, groups)
    sizes = torch.bincount(group_of, minlength=len(groups)).tolist()
    members = group_of.argsort(stable=True).split(sizes)
    half, group_half = (x.square().sum(1) / 2 for x in (centroids, groups))
    found = []
    for part in rows.split(_ELEMENTS // len(groups)):
        part = part.float()
        near = (part @ groups.T - group_half).topk(min(_GROUPS, len(groups)), dim=1).indices
        # All rows that look at one group at a time.
        order = near.flatten().argsort(stable=True)
        numbers = torch.bincount(near.flatten(), minlength=len(groups)).tolist()
        best = part.new_full((len(part),), -math.inf)
        label = torch.zeros(len(part), dtype=torch.int64, device=part.device)
        for own, looking in zip(members, (order // near.shape[1]).split(numbers), strict=True):
            if len(own) and len(looking):
                score, place = (part[looking] @ centroids[own].T - half[own]).max(1)
                better = score > best[looking]
                looking = looking[better]
                best[looking], label[looking] = score[better], own[place[better]]
        found.append(label)
    return torch.cat(found)
