"""Inclusion probabilities proportional to size, none above 1."""

import torch
from torch import Tensor

from manyclass._shard import Shard


def split_certain(weight: Tensor, k: int, shard: Shard | None = None) -> tuple[Tensor, Tensor]:
    """Solve π = min(1, a·weight) with Σ π = k: return the weights with 0 for classes of π = 1, and the ids of those.

    With the n heaviest classes certain, a = (k - n) / (weight of the rest); the next one is certain while a·weight
    reaches 1 for it. If there are more than k classes, at most k - 1 are certain: the others must be drawn too.

    Args:
        weight: float64 [C].
        k: the sum of π.
        shard: the classes of this process, to which `weight` and the ids belong; None: all.
    """
    positive = weight > 0
    number = int(positive.sum()) if shard is None else int(shard.sum(int(positive.sum())))
    if number <= k:
        return torch.zeros_like(weight), positive.nonzero().squeeze(1)
    if shard is not None:
        return _split_divided(weight, k, shard)
    heaviest, ids = weight.topk(k)
    n_th = torch.arange(k, 0, -1, dtype=torch.float64, device=weight.device)
    mass = weight.index_fill(0, ids, 0.0)
    rest = mass.sum() + heaviest.flip(0).cumsum(0).flip(0)
    n = _number_certain(heaviest, n_th, rest)
    return mass.index_copy_(0, ids[n:], heaviest[n:]), ids[:n].sort().values


def _number_certain(heaviest: Tensor, n_th: Tensor, rest: Tensor) -> int:
    # Ties may round to either side of 1: a class of π within 1e-12 of it counts as certain.
    reaches = heaviest * n_th >= rest * (1 - 1e-12)
    return min(len(heaviest) - 1, int(reaches.long().cumprod(0).sum()))


def _split_divided(weight: Tensor, k: int, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return what `split_certain` does for classes that are divided: the k heaviest of all are among those of each."""
    own, ids = weight.topk(min(k, len(weight)))
    padded = torch.zeros(k, dtype=torch.float64, device="cpu")
    padded[: len(own)] = own
    # Sorted stably by descending weight, so that ties are in the order of processes.
    heaviest, place = shard.vectors(padded).reshape(-1).sort(descending=True, stable=True)
    heaviest, owner = heaviest[:k], place[:k] // k
    number = int((owner == shard.rank).sum())
    mass = weight.index_fill(0, ids[:number], 0.0)
    n_th = torch.arange(k, 0, -1, dtype=torch.float64)
    n = _number_certain(heaviest, n_th, shard.sum(float(mass.sum())) + heaviest.flip(0).cumsum(0).flip(0))
    n = int((owner[:n] == shard.rank).sum())
    return mass.index_copy_(0, ids[n:number], own[n:number]), ids[:n].sort().values


def inclusion_probabilities(weight: Tensor, k: int) -> Tensor:
    """Return π = min(1, a·weight), float64 [C], solved for Σ π = k; 1 for every positive weight if k covers them."""
    pi, certain = split_certain(weight, k)
    if total := float(pi.sum()):
        pi.mul_((k - len(certain)) / total)
    return pi.index_fill_(0, certain, 1.0)
