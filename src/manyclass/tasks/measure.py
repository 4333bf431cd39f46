"""The evaluation of a model: exact likelihood and ranks, in total and by class frequency."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from manyclass.errors import UserError
from manyclass.tasks.metrics import check_at, metric_names, rank_metrics
from manyclass.tasks.model import Model
from manyclass.training import ALONE, Evaluation, NoExamplesError, Ranks, evaluate


@dataclass(frozen=True)
class Band:
    """Means over the examples whose class has a training count in a range.

    Args:
        low, high: the range of counts, inclusive.
        examples: the sum of the weights.
        loss: mean negative log likelihood.
        metrics: means, by name.
    """

    low: int
    high: int
    examples: float
    loss: float
    metrics: Mapping[str, float]

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return _perplexity(self.loss)

    @property
    def name(self) -> str:
        """The range of counts as text."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Measured:
    """Means over examples that a model was not trained on.

    Args:
        loss: mean negative log likelihood, over all classes.
        metrics: means, by name.
        examples: the sum of the weights.
        bands: the same by class frequency, rare classes first.
    """

    loss: float
    metrics: Mapping[str, float]
    examples: float
    bands: tuple[Band, ...]

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return _perplexity(self.loss)

    def to_json(self) -> dict[str, object]:
        """Return the numbers as `json.dumps` takes them."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            **self.metrics,
            "examples": self.examples,
            "by_frequency": [
                {"count": band.name, "examples": band.examples, "loss": band.loss, **band.metrics}
                for band in self.bands
            ],
        }


def measure(
    model: Model, batches: Iterable[object], *, at: Sequence[int] | None = None, ranks: Ranks = ALONE
) -> Measured:
    """Evaluate a model on batches, in total and by class frequency.

    Args:
        model: the model.
        batches: batches of its task.
        at: each k of the metrics at k; None: as in the training.
        ranks: the processes among which the model is divided, each with its part of every batch.

    Raises:
        UserError: there is no example, or a k is above the number of classes.
        ValueError: a k is below 1 or repeated.
    """
    spec = model.spec
    if at is not None:
        check_at(at, len(spec.names))
        spec = replace(spec, settings=replace(spec.settings, at=tuple(at)))
    # Bands are powers of ten: 0, 1 to 9, 10 to 99, …
    counts = spec.counts.to(model.device)
    band_of = torch.where(counts > 0, counts.clamp(min=1).log10().floor() + 1, 0).long()
    metrics = rank_metrics(model.head, metric_names(spec))
    try:
        found = evaluate(model.head, batches, encoder=model.encoder, metrics=metrics, groups=band_of, ranks=ranks)
    except NoExamplesError:
        raise UserError("`data` must hold examples of classes that the model knows, got none") from None
    bands = tuple(_band(power, part) for power, part in found.groups.items())
    return Measured(found.loss, found.metrics, found.examples, bands)


def _band(power: int, found: Evaluation) -> Band:
    low, high = (0, 0) if power == 0 else (10 ** (power - 1), 10**power - 1)
    return Band(low, high, found.examples, found.loss, found.metrics)


def _perplexity(loss: float) -> float:
    # exp(710) overflows a float.
    return math.exp(min(loss, 700.0))
