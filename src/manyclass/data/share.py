"""The part of each batch that one of several processes trains or evaluates on."""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from manyclass.defaults import IGNORE_INDEX

Indices = TypeVar("Indices", Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True)
class Share:
    """The part of one rank: batches stay those of one process, and each rank takes a run of their examples.

    The sizes of the runs differ by at most one. An encoder cannot run on no example, so a rank without one gets the
    first example of the batch, whose targets are ignored.

    Args:
        rank: this rank.
        ranks: the number of ranks.

    Example:
        >>> import torch
        >>> [Share(rank, 3).of(np.arange(2)).tolist() for rank in range(3)]
        [[0], [0], [1]]
        >>> [Share(rank, 3).targets(torch.tensor([7]), size=2).tolist() for rank in range(3)]
        [[-100], [7], [7]]
    """

    rank: int = 0
    ranks: int = 1

    def of(self, batch: Indices) -> Indices:
        """Return the part of this rank of the examples of a batch."""
        if self.ranks == 1:
            return batch
        first, last = self._ends(len(batch))
        return batch[first:last] if last > first else batch[:1]

    def targets(self, target: Tensor, *, size: int) -> Tensor:
        """Return the targets of the part of a batch of `size` examples, ignored if this rank has none of them."""
        first, last = self._ends(size)
        return target if last > first else target.new_full(target.shape, IGNORE_INDEX)

    def _ends(self, size: int) -> tuple[int, int]:
        return size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks


WHOLE = Share()
