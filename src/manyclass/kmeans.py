"""K-means of class vectors.

It is written here because it must run on the device of the head, in bounded memory, and give the same clusters for the
same vectors; no library that we depend on does all three.
"""

import math

import torch
from torch import Tensor

from manyclass._context import isolated

ROWS_PER_CENTROID = 64  # in the sample that centroids are fitted to
FIRST_ITERATIONS, LATER_ITERATIONS = 8, 2
MAX_SCORES = 1 << 25  # held in memory at once
MAX_COMPARED_CENTROIDS = 2048  # beyond, a row is compared with those of the nearest groups only
NEAREST_GROUPS = 4


@isolated()
def fit_centroids(vectors: Tensor, number: int, start: Tensor | None = None) -> Tensor:
    """Return centroids float32 [J, D] of a sample of vectors [N, D], sorted along their direction of largest variance.

    Args:
        vectors: at least one row.
        number: J.
        start: centroids of an earlier fit, to start from; None: start from rows of the sample.
    """
    # A fixed seed: draws must depend on the generator they are given and on no other random state.
    chosen = torch.randint(len(vectors), (ROWS_PER_CENTROID * number,), generator=torch.Generator().manual_seed(0))
    rows = vectors[chosen.to(vectors.device)].float()
    centroids = rows[:number].clone() if start is None else start
    for turn in range(FIRST_ITERATIONS if start is None else LATER_ITERATIONS):
        label = nearest_centroids(rows, centroids)
        total = torch.zeros_like(centroids).index_add_(0, label, rows)
        count = torch.bincount(label, minlength=number).unsqueeze(1)
        # An empty cluster restarts at a row of the sample.
        elsewhere = rows.roll(-(turn + 1) * number, 0)[:number]
        centroids = torch.where(count > 0, total / count.clamp(min=1), elsewhere)
    centred = centroids - centroids.mean(0)
    spread = centred.T @ centred
    # Vectors that have diverged have no such direction, and the loss reports them better than the solver does.
    if not spread.isfinite().all():
        return centroids
    direction = torch.linalg.eigh(spread).eigenvectors[:, -1]
    return centroids[(centred @ direction).argsort()].contiguous()


@isolated()
def nearest_centroids(rows: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid of each row, in chunks that fit into memory.

    Beyond 2,048 centroids the search is approximate: a row is compared with the centroids of the nearest groups only.
    A class in the wrong cluster costs a little variance; comparing C classes with all 4√C centroids costs minutes.
    """
    if len(centroids) > MAX_COMPARED_CENTROIDS:
        return _nearest_in_groups(rows, centroids)
    half = centroids.square().sum(1) / 2
    parts = rows.split(max(1, MAX_SCORES // len(centroids)))
    return torch.cat([(part.float() @ centroids.T - half).argmax(1) for part in parts])


def _nearest_in_groups(rows: Tensor, centroids: Tensor) -> Tensor:
    groups = fit_centroids(centroids, math.isqrt(len(centroids)))
    group_of = nearest_centroids(centroids, groups)
    sizes = torch.bincount(group_of, minlength=len(groups)).tolist()
    members = group_of.argsort(stable=True).split(sizes)
    half, group_half = (x.square().sum(1) / 2 for x in (centroids, groups))
    found = []
    for part in rows.split(MAX_SCORES // len(groups)):
        part = part.float()
        near = (part @ groups.T - group_half).topk(min(NEAREST_GROUPS, len(groups)), dim=1).indices
        # One group of centroids at a time, with all rows that are compared with it.
        order = near.flatten().argsort(stable=True)
        numbers = torch.bincount(near.flatten(), minlength=len(groups)).tolist()
        best = part.new_full((len(part),), -math.inf)
        label = torch.zeros(len(part), dtype=torch.int64, device=part.device)
        for group, here in zip(members, (order // near.shape[1]).split(numbers), strict=True):
            if len(group) and len(here):
                score, place = (part[here] @ centroids[group].T - half[group]).max(1)
                better = score > best[here]
                here = here[better]
                best[here], label[here] = score[better], group[place[better]]
        found.append(label)
    return torch.cat(found)
