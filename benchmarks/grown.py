"""Tables of more classes than a trained model has, grown from its class vectors."""

import math

import torch
from torch import Tensor

CHUNK_CLASSES = 1 << 16


def grown_vectors(weight: Tensor, bias: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return class vectors [num_classes, D] and biases: several classes for each class of the model, or its first ones.

    The first class of a family is the model's own. The others have its vector plus noise of half its length, and its
    bias minus the log of the family's size and a random amount.
    """
    table, biases = torch.empty(num_classes, weight.shape[1]), torch.empty(num_classes)
    generator = torch.Generator().manual_seed(1)
    families = num_classes / len(weight)
    for start in range(0, num_classes, CHUNK_CLASSES):
        ids = torch.arange(start, min(start + CHUNK_CLASSES, num_classes))
        own, noise = ids % len(weight), torch.randn(len(ids), weight.shape[1], generator=generator)
        length = weight[own].norm(dim=1, keepdim=True) * (0.5 / math.sqrt(weight.shape[1]))
        less = math.log(max(1.0, families)) + torch.randn(len(ids), generator=generator).abs()
        first = ids < len(weight)
        table[start : start + CHUNK_CLASSES] = weight[own] + noise * length.masked_fill(first.unsqueeze(1), 0)
        biases[start : start + CHUNK_CLASSES] = bias[own] - less.masked_fill(first, 0)
    return table, biases
