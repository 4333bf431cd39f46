"""The softmax over all classes, as PyTorch computes it."""

import torch.nn.functional as F
from torch import Tensor, nn

from manyclass.defaults import IGNORE_INDEX


class ExactSoftmax(nn.Module):
    """What stands where a head stands, and scores all classes in every step.

    Args:
        linear: the class vectors and biases.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(
        self, hidden: Tensor, target: Tensor, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean"
    ) -> Tensor:
        scores = self.linear(hidden)
        loss = F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction)
        return loss.reshape(target.shape) if reduction == "none" else loss
