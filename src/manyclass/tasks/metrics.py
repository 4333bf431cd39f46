"""Metrics of ranks: accuracy, reciprocal rank, discounted gain; each of all ranks, or of those up to k."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from manyclass.defaults import IGNORE_INDEX
from manyclass.errors import UserError
from manyclass.heads import ClassHead
from manyclass.inference import ranks
from manyclass.tasks.task import ModelSpec
from manyclass.training import Batch

# Functions of ranks to values; ranks beyond the k of a metric have the value 0.
METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy": torch.ones_like,
    "hits": torch.ones_like,
    "HR": torch.ones_like,
    "MRR": torch.reciprocal,
    "NDCG": lambda rank: 1 / torch.log2(1 + rank),
}


def metric_of_ranks(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of ranks to values that a name such as MRR or NDCG@20 means; accuracy is accuracy@1.

    Example:
        >>> metric_of_ranks("MRR@2")(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [1.0, 0.5, 0.0]
    """
    kind, _, cut = name.partition("@")
    value, most = METRICS[kind], float(cut) if cut else 1.0 if kind == "accuracy" else math.inf
    return lambda rank: torch.where(rank <= most, value(rank), 0.0)


def metric_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a model's metrics: those of its task, where a name that ends with @ stands for each k."""
    names = spec.task.metrics
    at_k = (f"{name}{k}" for k in _cuts(spec) for name in names if name.endswith("@"))
    return (*(name for name in names if not name.endswith("@")), *at_k)


def best_by(spec: ModelSpec) -> str:
    """Return the name of the metric that selects the best model, at the first k of the settings."""
    name = spec.task.best_by
    return f"{name}{_cuts(spec)[0]}" if name.endswith("@") else name


def check_at(at: Sequence[int] | None, num_classes: int) -> None:
    """Check the k of metrics that a user has given against the number of classes.

    Raises:
        UserError: one is above the number of classes.
    """
    for k in at or ():
        if k > num_classes:
            raise UserError(f"`at` must be at most the number of classes, {num_classes:,}, got {k:,}")


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

    def metric(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Batch], Tensor]:
        return lambda hidden, batch: value(ranked(hidden, batch))

    return {name: metric(metric_of_ranks(name)) for name in names}


def _cuts(spec: ModelSpec) -> Sequence[int]:
    return spec.settings.at or spec.task.defaults.at or ()
