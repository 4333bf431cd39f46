"""The scores of all classes, exactly."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass.heads import ClassHead, TopK, exact_log_z, exact_topk

_ELEMENTS = 1 << 23  # of class vectors in float64 at once


@dataclass(frozen=True)
class Scores:
    """A head's scores in float64: what is predicted of a row does not depend on the rows that lie beside it.

    In float32 the last digits of a matrix product change with the number of its rows.

    Args:
        head: whose similarity is "dot".
    """

    head: ClassHead

    @property
    def num_classes(self) -> int:
        return self.head.num_classes

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """For each run of at most `size` classes its first id and a function from hidden [B, D] to scores."""
        size = max(1, min(size, _ELEMENTS // self.head.dim))
        for start in range(0, self.num_classes, size):
            rows = slice(start, start + size)

            def score(hidden: Tensor, rows: slice = rows) -> Tensor:
                bias = None if self.head.bias is None else self.head.bias[rows].double()
                return F.linear(hidden, self.head.weight[rows].double(), bias)

            yield start, score

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k most probable classes of hidden [B, D], float64."""
        return exact_topk(self, hidden, k)

    @torch.no_grad()
    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[B]: the log-probability of one class each."""
        score = (hidden * self.head.weight[ids].double()).sum(1)
        score = score if self.head.bias is None else score + self.head.bias[ids].double()
        return score - exact_log_z(self, hidden)

    @torch.no_grad()
    def log_probs(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """For each run of classes its first id and their log-probabilities [B, size]."""
        normaliser = exact_log_z(self, hidden).unsqueeze(1)
        for start, score in self.score_chunks(max(1, _ELEMENTS // len(hidden))):
            yield start, score(hidden) - normaliser
