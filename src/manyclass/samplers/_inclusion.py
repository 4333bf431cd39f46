"""Inclusion probabilities proportional to size, none above 1."""

import torch
from torch import Tensor


def split_certain(weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """For π = min(1, a·weight) with Σ π = k: the weights of classes of π < 1 (0 for the others), ids of the others.

    With the n heaviest classes certain, a = (k - n) / (weight of the rest); one more is certain while its own
    a·weight reaches 1. At most k classes can be, so only the k heaviest are looked at.
    """
    positive = weight > 0
    if int(positive.sum()) <= k:
        return torch.zeros_like(weight), positive.nonzero().squeeze(1)
    heaviest, ids = weight.topk(k)
    n_th = torch.arange(k, 0, -1, dtype=torch.float64, device=weight.device)
    mass = weight.index_fill(0, ids, 0.0)
    rest = mass.sum() + heaviest.flip(0).cumsum(0).flip(0)
    # Ties may round to either side of 1; a class of π within 1e-12 of it is as well certain.
    reaches = heaviest * n_th >= rest * (1 - 1e-12)
    n = int(reaches.long().cumprod(0).sum())
    return mass.index_copy_(0, ids[n:], heaviest[n:]), ids[:n].sort().values


def inclusion_probabilities(weight: Tensor, k: int) -> Tensor:
    """float64 [C]: π = min(1, a·weight), a solved for Σ π = k; 1 for every positive weight where k covers them."""
    pi, certain = split_certain(weight, k)
    if total := float(pi.sum()):
        pi.mul_((k - len(certain)) / total)
    return pi.index_fill_(0, certain, 1.0)
