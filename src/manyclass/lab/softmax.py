"""The exact softmax loss of PyTorch behind the interface of a head."""

import torch.nn.functional as F
from torch import Tensor, nn

from manyclass.defaults import IGNORE_INDEX


class ExactSoftmax(nn.Module):
    """Drop-in replacement for a head that scores all classes in every step.

    Args:
        linear: the class vectors and biases.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(
        self, hidden: Tensor, target: Tensor, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean"
    ) -> Tensor:
        """Return the cross-entropy over all classes."""
        scores = self.linear(hidden)
        loss = F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction)
        return loss.reshape(target.shape) if reduction == "none" else loss
