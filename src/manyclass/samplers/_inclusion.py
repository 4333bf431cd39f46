"""Inclusion probabilities proportional to size, none above 1."""

import torch
from torch import Tensor


def split_certain(weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Solve π = min(1, a·weight) with Σ π = k: return the weights with 0 for classes of π = 1, and the ids of those.

    With the n heaviest classes certain, a = (k - n) / (weight of the rest); the next one is certain while a·weight
    reaches 1 for it. If there are more than k classes, at most k - 1 are certain: the others must be drawn too.
    """
    positive = weight > 0
    if int(positive.sum()) <= k:
        return torch.zeros_like(weight), positive.nonzero().squeeze(1)
    heaviest, ids = weight.topk(k)
    n_th = torch.arange(k, 0, -1, dtype=torch.float64, device=weight.device)
    mass = weight.index_fill(0, ids, 0.0)
    rest = mass.sum() + heaviest.flip(0).cumsum(0).flip(0)
    # Ties may round to either side of 1: a class of π within 1e-12 of it counts as certain.
    reaches = heaviest * n_th >= rest * (1 - 1e-12)
    n = min(k - 1, int(reaches.long().cumprod(0).sum()))
    return mass.index_copy_(0, ids[n:], heaviest[n:]), ids[:n].sort().values


def inclusion_probabilities(weight: Tensor, k: int) -> Tensor:
    """Return π = min(1, a·weight), float64 [C], solved for Σ π = k; 1 for every positive weight if k covers them."""
    pi, certain = split_certain(weight, k)
    if total := float(pi.sum()):
        pi.mul_((k - len(certain)) / total)
    return pi.index_fill_(0, certain, 1.0)
