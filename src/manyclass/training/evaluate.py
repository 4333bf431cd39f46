"""The exact held-out likelihood, and metrics beside it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import fork_rng
from manyclass.defaults import IGNORE_INDEX
from manyclass.eval_mode import eval_mode
from manyclass.training.batch import Batch, device_of
from manyclass.training.history import Progress
from manyclass.training.ranks import ALONE, Ranks

Metric = Callable[[Tensor, Batch], Tensor]


class NoExamplesError(ValueError):
    """An evaluation on batches without an example that counts."""


@dataclass(frozen=True)
class HeldOut:
    """The data to evaluate on, when to evaluate, and when to stop early.

    Args:
        batches: a re-iterable of batches, in the form of those to train on.
        every: steps between evaluations. None: evaluate after each epoch. The end of the training is evaluated too.
        seconds: seconds of training between evaluations, instead of steps; such a run is not reproducible.
        metrics: further measures by name: functions of hidden [..., D] and a `Batch` to a value per example [...].
        by: the criterion of the best evaluation: "loss", or the name of a metric, larger is better.
        patience: stop after this many evaluations in a row without a new best. None: never stop early.
        restore_best: at the end, load the parameters of the best evaluation back into encoder and head. The copy is
            kept on their device. An interrupted training keeps its last parameters, so that it can be resumed.

    Raises:
        TypeError: `batches` is an iterator, which can be read only once.
        ValueError: `every` or `patience` is below 1, `seconds` is not above 0, or `every` and `seconds` are both given.
    """

    batches: Iterable[object]
    every: int | None = None
    seconds: float | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    by: str = "loss"
    patience: int | None = None
    restore_best: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator):
            raise TypeError(
                f"`batches` must be iterable more than once to evaluate on, got a {type(self.batches).__name__}"
            )
        if self.seconds is not None:
            _check.number("seconds", self.seconds, low=0, strict=True)
            if self.every is not None:
                raise ValueError(f"`seconds` must be None if `every` is given, got {self.seconds}")
        _check.choice("by", self.by, ("loss", *self.metrics))
        for name in ("every", "patience"):
            if (value := getattr(self, name)) is not None:
                _check.integer(name, value, 1)

    def is_due(self, before: Progress, now: Progress) -> bool:
        """Return True if the step between two progresses calls for an evaluation; ends of epochs are not considered."""
        if self.seconds is not None:
            return now.seconds // self.seconds > before.seconds // self.seconds
        return self.every is not None and now.step % self.every == 0

    @property
    def by_epoch(self) -> bool:
        """True if each epoch ends with an evaluation."""
        return self.every is None and self.seconds is None


@dataclass(frozen=True)
class Evaluation:
    """Weighted means over the examples of all batches.

    Args:
        loss: the exact negative log likelihood.
        metrics: the user's, by name.
        examples: the sum of the weights.
        groups: the same for each group of classes that has examples, if groups were given.
    """

    loss: float
    metrics: Mapping[str, float]
    examples: float
    groups: "Mapping[int, Evaluation]" = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    head: nn.Module,
    batches: Iterable[object],
    *,
    encoder: nn.Module | None = None,
    metrics: Mapping[str, Metric] | None = None,
    groups: Tensor | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Return the exact mean negative log likelihood over all classes, and metrics, computed in evaluation mode.

    Args:
        head: a head with `exact_loss`; another module is taken to be exact itself.
        batches: `(inputs, target)` or `(inputs, target, extras)`, see `Batch`.
        encoder: maps inputs to the head's `hidden`. None: inputs are `hidden`.
        metrics: further measures by name: functions of hidden [..., D] and a `Batch` to a value per example [...].
        groups: int64 [C], the group of each class, to report the same means for each group of targets.
        ranks: the processes that evaluate together, each on its part of every batch.

    Raises:
        NoExamplesError: no example counts.
        ValueError: a metric has another shape than the targets.

    Example:
        >>> from manyclass import ClassHead
        >>> head = ClassHead(8, 500)
        >>> batches = [(torch.randn(16, 8), torch.arange(16))]
        >>> def accuracy(hidden, batch):
        ...     return head.topk(hidden, 1).ids.squeeze(-1) == batch.target
        >>> report = evaluate(head, batches, metrics={"accuracy": accuracy})
        >>> report.loss > 0, 0 <= report.metrics["accuracy"] <= 1
        (True, True)
    """
    device = device_of(head)
    exact_loss: Callable[..., Tensor] = getattr(head, "exact_loss", head)
    metrics = {} if metrics is None else metrics
    # The sums stay on the device until the end: one sync for all batches.
    number = 1 if groups is None else int(groups.max()) + 1
    sums = torch.zeros(number, 2 + len(metrics), dtype=torch.float64, device=device)
    with fork_rng(device), eval_mode(head, *([] if encoder is None else [encoder])):
        for item in batches:
            batch = Batch.of(item, device)
            hidden = batch.inputs if encoder is None else encoder(batch.inputs)
            exclude = {} if batch.exclude is None else {"exclude": batch.exclude}
            values = [exact_loss(hidden, batch.target, **exclude, ignore_index=IGNORE_INDEX, reduction="none")]
            for name, metric in metrics.items():
                values.append(metric(hidden, batch))
                _check.shape(f"metrics[{name!r}]", values[-1], tuple(batch.target.shape))
            weight = torch.ones_like(sums[0, 0]) if batch.weight is None else batch.weight.double()
            weight = torch.where(batch.target == IGNORE_INDEX, 0.0, weight)
            # Examples without weight must not count, not even as NaN.
            parts = [weight, *(torch.where(weight > 0, weight * value, 0.0) for value in values)]
            if groups is None:
                sums[0] += torch.stack([part.sum() for part in parts])
            else:
                group = groups[batch.target.clamp(min=0).flatten()]
                sums.index_add_(0, group, torch.stack([part.flatten() for part in parts], 1))
    sums = ranks.summed(sums)
    total, *rows = [sums.sum(0).tolist(), *([] if groups is None else sums.tolist())]
    if total[0] == 0:
        raise NoExamplesError("`batches` must hold an example to evaluate on, got none that is not ignored")
    by_group = {group: _means(row, metrics) for group, row in enumerate(rows) if row[0] > 0}
    return _means(total, metrics, by_group)


def _means(sums: list[float], names: Iterable[str], groups: Mapping[int, Evaluation] | None = None) -> Evaluation:
    examples, loss, *others = (sums[0], *(value / sums[0] for value in sums[1:]))
    return Evaluation(loss, dict(zip(names, others, strict=True)), examples, groups or {})
