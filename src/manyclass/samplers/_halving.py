"""An order of vectors in which neighbours are similar, by repeated halving."""

import math

import torch
from torch import Tensor

from manyclass._context import isolated

SAMPLED_ROWS = 128  # of a run, from which the direction of its split is found
DIRECTION_ITERATIONS = 4
ROWS_AT_ONCE = 1 << 14  # fit into the cache of a processor


@isolated()
def order_by_halving(vectors: Tensor, bounds: Tensor) -> Tensor:
    """Return an order int64 [N] of vectors float32 [N, D] in which each run between two bounds holds similar ones.

    Each run is halved along the direction between the means of its two halves, which balanced 2-means finds from a
    sample of its rows. The same vectors give the same order, in time N log N.

    Args:
        vectors: float32 [N, D].
        bounds: int64 [2^L + 1] on the CPU, from 0 to N: the ends of the runs after L halvings, i N / 2^L rounded down.
    """
    order = torch.arange(len(vectors), device=vectors.device)
    levels = (len(bounds) - 1).bit_length() - 1
    level = 0
    fits = len(vectors) <= ROWS_AT_ONCE
    while level < levels and (fits or len(vectors) >> level > ROWS_AT_ONCE):
        order = _halved(vectors, order, bounds[:: 1 << (levels - level)])
        level += 1
    if level == levels:
        return order
    # Runs that fit into the cache are halved to the end one by one, so that their rows are gathered once.
    inner_runs = 1 << (levels - level)
    for first in range(0, 1 << levels, inner_runs):
        inner = bounds[first : first + inner_runs + 1]
        here = order[inner[0] : inner[-1]]
        order[inner[0] : inner[-1]] = here[order_by_halving(vectors[here], inner - inner[0])]
    return order


def _halved(vectors: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """Return the order with each run between two bounds sorted along the direction of its split."""
    bounds = bounds.to(order.device)
    start, size = bounds[:-1, None], bounds.diff().unsqueeze(1)
    longest = -(-len(order) // len(start))
    sampled = min(SAMPLED_ROWS, longest)
    chosen = start + torch.arange(sampled, device=order.device) * size // sampled
    direction = _directions(vectors[order[chosen]])
    place = torch.arange(longest, device=order.device)
    rows = order[(start + place).clamp_(max=len(order) - 1)]
    if len(start) == 1:
        along = torch.cat([vectors[part] @ direction[0] for part in order.split(ROWS_AT_ONCE)]).unsqueeze(0)
    else:
        runs = max(1, ROWS_AT_ONCE // longest)
        pairs = zip(rows.split(runs), direction.split(runs), strict=True)
        along = torch.cat([(vectors[part] @ d.unsqueeze(2)).squeeze(2) for part, d in pairs])
    # Runs differ in length by one at most: the last place of a shorter one is sorted to its end.
    inside = place < size
    ranks = along.masked_fill_(~inside, math.inf).argsort(dim=1, stable=True)
    return rows.gather(1, ranks)[inside]


def _directions(rows: Tensor) -> Tensor:
    """Return the directions [N, D] between the means of the two halves of rows [N, R, D], by balanced 2-means."""
    rows = rows - rows.mean(1, keepdim=True)
    farthest = rows.square().sum(2).argmax(1)
    direction = rows[torch.arange(len(rows), device=rows.device), farthest]
    for _ in range(DIRECTION_ITERATIONS):
        along = (rows @ direction.unsqueeze(2)).squeeze(2)
        upper = (along > along.median(1, keepdim=True).values).to(rows.dtype)
        direction = (upper.unsqueeze(1) @ rows).squeeze(1)
    return direction
