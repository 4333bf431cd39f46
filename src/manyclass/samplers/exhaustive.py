"""All classes, each standing for itself: the exact normaliser."""

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._shard import Shard
from manyclass.candidates import Block, Candidates
from manyclass.kernels import EXACT_WAYS
from manyclass.samplers._sampler import always_settled, checked_draw, no_learning, no_schedule, no_vectors


class Exhaustive(nn.Module):
    """All C classes, κ = 1. `Likelihood` over it is the exact cross entropy.

    Args:
        num_classes: C.
        way: the way to the exact loss, one of `kernels.EXACT_WAYS`. For None, and for a batch that the way does not
            support, it follows from shapes and device alone.

    Example:
        >>> Exhaustive(4)(torch.tensor([2])).ids()
        tensor([[0, 1, 2, 3]])
    """

    unbiased = True
    renormalises = False
    device = None
    learns = False
    attach, advance, observe = no_vectors, no_schedule, no_learning

    def __init__(self, num_classes: int, *, way: str | None = None) -> None:
        super().__init__()
        self.num_classes = _check.integer("num_classes", num_classes, 1)
        if way is not None:
            _check.choice("way", way, EXACT_WAYS)
        self.way = way
        self.shard: Shard | None = None

    is_settled = always_settled

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the constants of a recorded step."""
        return self.num_classes, self.way

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone."""
        self.shard = shard

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        first, size = (0, self.num_classes) if self.shard is None else (self.shard.first, self.shard.size)
        ids = torch.arange(first, first + size, device=target.device).unsqueeze(0)
        log_kappa = torch.zeros(ids.shape, dtype=torch.float64, device=target.device)
        return Candidates(
            (Block(ids, log_kappa),),
            exclude,
            lambda: torch.zeros(target.shape, dtype=torch.float64, device=target.device),
            self.num_classes,
            is_exhaustive=True,
            way=self.way,
        )

    def refresh(self) -> None:
        """Do nothing: there are no tables."""

    def resize(self, num_classes: int) -> None:
        """Change the number of classes."""
        self.num_classes = _check.integer("num_classes", num_classes, 1)

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"num_classes={self.num_classes}"
