"""The exact held-out likelihood."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.training._random import undisturbed
from manyclass.training.batch import IGNORED, Batch, device_of
from manyclass.training.history import Progress

Metric = Callable[[Tensor, Batch], Tensor]


@dataclass(frozen=True)
class HeldOut:
    """What to evaluate on, when, and what follows from it.

    Args:
        batches: a re-iterable of batches, as those to train on.
        every: how many steps lie between evaluations. None: an epoch. The end of the training is evaluated as well.
        seconds: how many seconds of training lie between evaluations, instead of steps; a run is then not the same
            twice.
        metrics: more to measure, by name: functions of hidden [..., D] and a `Batch` to a value per example [...].
        by: what the best evaluation is the best by: "loss", or the name of a metric that is to be great.
        patience: stop after so many evaluations in a row that are no better than the best. None: never.
        restore_best: whether the encoder and the head get the parameters of the best evaluation back at the end. They
            are kept on their device meanwhile. An interrupted training keeps its last ones, so that it can go on.

    Raises:
        TypeError: `batches` is an iterator, which can be read only once.
        ValueError: `every` or `patience` is below 1, `seconds` is not above 0, or both are given.
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
                raise ValueError(f"`seconds` must be None where `every` is given, got {self.seconds}")
        _check.choice("by", self.by, ("loss", *self.metrics))
        for name in ("every", "patience"):
            if (value := getattr(self, name)) is not None:
                _check.whole(name, value, 1)

    def due(self, before: Progress, now: Progress) -> bool:
        """Whether to evaluate after a step, apart from the ends of epochs."""
        if self.seconds is not None:
            return now.seconds // self.seconds > before.seconds // self.seconds
        return self.every is not None and now.step % self.every == 0

    @property
    def by_epoch(self) -> bool:
        return self.every is None and self.seconds is None


@dataclass(frozen=True)
class Evaluation:
    """Weighted means over the examples of all batches.

    Args:
        loss: the exact negative log likelihood.
        metrics: the user's, by name.
    """

    loss: float
    metrics: Mapping[str, float]


@torch.no_grad()
def evaluate(
    head: nn.Module,
    batches: Iterable[object],
    *,
    encoder: nn.Module | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """The exact negative log likelihood of an example, over all classes, in evaluation mode.

    Args:
        head: one with `exact_loss`; one without is taken to be exact itself.
        batches: `(inputs, target)` or `(inputs, target, extras)`, see `Batch`.
        encoder: from inputs to the head's `hidden`. None: inputs are that.
        metrics: more to measure, by name: functions of hidden [..., D] and a `Batch` to a value per example [...].

    Raises:
        ValueError: there is no example, or a metric has another shape than the targets.

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
    # On the device until the end: one wait for all batches.
    total = torch.zeros(1 + len(metrics), dtype=torch.float64, device=device)
    share = torch.zeros((), dtype=torch.float64, device=device)
    with undisturbed(device), evaluating(head, *([] if encoder is None else [encoder])):
        for item in batches:
            batch = Batch.of(item, device)
            hidden = batch.inputs if encoder is None else encoder(batch.inputs)
            exclude = {} if batch.exclude is None else {"exclude": batch.exclude}
            values = [exact_loss(hidden, batch.target, **exclude, ignore_index=IGNORED, reduction="none")]
            for name, metric in metrics.items():
                values.append(metric(hidden, batch))
                _check.shape(f"metrics[{name!r}]", values[-1], tuple(batch.target.shape))
            weight = torch.ones_like(total[0]) if batch.weight is None else batch.weight.double()
            weight = torch.where(batch.target == IGNORED, 0.0, weight)
            # What has no weight must not count, not even as NaN.
            total += torch.stack([torch.where(weight > 0, weight * value, 0.0).sum() for value in values])
            share += weight.sum()
    if share == 0:
        raise ValueError("`batches` must hold an example to evaluate on, got none that is not ignored")
    loss, *others = (total / share).tolist()
    return Evaluation(loss, dict(zip(metrics, others, strict=True)))


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode, and then each part in the mode it was in: users freeze some."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode
