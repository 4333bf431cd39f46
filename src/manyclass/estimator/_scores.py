"""Exact scores of all classes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass.heads import ClassHead, TopK, exact_scores, exact_topk

_CHUNK_ELEMENTS = 1 << 23  # of class vectors in float64


@dataclass(frozen=True)
class Scores:
    """Scores of a head in float64, so that a prediction does not depend on the other rows of its batch.

    In float32 the last digits of a matrix product change with its number of rows.

    Args:
        head: head whose similarity is "dot".
    """

    head: ClassHead
    # The estimator holds all classes.
    shard: None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.head.num_classes

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """Iterate over chunks of at most `size` classes: the first id, and a function of hidden [B, D] to scores."""
        size = max(1, min(size, _CHUNK_ELEMENTS // self.head.dim))
        for start in range(0, self.num_classes, size):
            rows = slice(start, start + size)

            def score(hidden: Tensor, rows: slice = rows) -> Tensor:
                bias = None if self.head.bias is None else self.head.bias[rows].double()
                return F.linear(hidden, self.head.weight[rows].double(), bias)

            yield start, score

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """Return the k most probable classes of hidden [B, D], float64."""
        return exact_topk(self, hidden, k)

    @torch.no_grad()
    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probability [B] of one class per row."""
        score, log_z = exact_scores(self, hidden, ids.unsqueeze(1))
        return score.squeeze(1) - log_z

    @torch.no_grad()
    def log_probs(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Iterate over chunks of classes: the first id, and log-probabilities [B, size]."""
        # The same chunks twice: scores of other products could lie above log Z by their rounding.
        chunks = list(self.score_chunks(max(1, _CHUNK_ELEMENTS // len(hidden))))
        log_z = torch.stack([score(hidden).logsumexp(1) for _, score in chunks]).logsumexp(0).unsqueeze(1)
        for start, score in chunks:
            yield start, score(hidden) - log_z
