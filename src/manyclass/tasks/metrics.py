"""Metrics of ranks: accuracy, reciprocal rank, discounted gain."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from manyclass.defaults import IGNORE_INDEX
from manyclass.heads import ClassHead
from manyclass.inference import ranks
from manyclass.training import Batch

# Functions of ranks to values.
METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy": lambda rank: rank <= 1,
    "accuracy@5": lambda rank: rank <= 5,
    "accuracy@10": lambda rank: rank <= 10,
    "hits@1": lambda rank: rank <= 1,
    "hits@3": lambda rank: rank <= 3,
    "hits@10": lambda rank: rank <= 10,
    "MRR": lambda rank: 1 / rank,
    "HR@10": lambda rank: rank <= 10,
    "NDCG@10": lambda rank: torch.where(rank <= 10, 1 / torch.log2(1 + rank), 0.0),
}


def rank_metrics(head: ClassHead, names: Sequence[str]) -> Mapping[str, Callable[[Tensor, Batch], Tensor]]:
    """Return metrics for `evaluate` by name; all share one ranking of each batch."""
    cached: list[tuple[Batch, Tensor]] = []

    def ranked(hidden: Tensor, batch: Batch) -> Tensor:
        if not cached or cached[0][0] is not batch:
            present = batch.target != IGNORE_INDEX
            exclude = None if batch.exclude is None else batch.exclude[present]
            rank = torch.full(batch.target.shape, torch.nan, dtype=torch.float64, device=batch.target.device)
            rank[present] = ranks(head, hidden[present], batch.target[present], exclude=exclude)
            cached[:] = [(batch, rank)]
        return cached[0][1]

    def metric(name: str) -> Callable[[Tensor, Batch], Tensor]:
        return lambda hidden, batch: METRICS[name](ranked(hidden, batch)).double()

    return {name: metric(name) for name in names}
