"""How good a model is: exact likelihood, ranks, and both by how frequent classes are."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from manyclass.errors import UserError
from manyclass.tasks.kinds import KINDS
from manyclass.tasks.metrics import rank_metrics
from manyclass.tasks.model import Model
from manyclass.training import Batch
from manyclass.training.batch import IGNORED
from manyclass.training.evaluate import evaluating


@dataclass(frozen=True)
class Band:
    """Examples whose class was so frequent in training.

    Args:
        low, high: least and greatest count.
        examples: how many.
        loss: their mean negative log likelihood.
        metrics: their means, by name.
    """

    low: int
    high: int
    examples: float
    loss: float
    metrics: Mapping[str, float]

    @property
    def perplexity(self) -> float:
        return _perplexity(self.loss)

    @property
    def name(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Measured:
    """A model on examples that it was not trained on.

    Args:
        loss: the mean negative log likelihood, over all classes.
        metrics: means, by name.
        examples: how many, by weight.
        bands: the same by how frequent classes are, rare ones first.
    """

    loss: float
    metrics: Mapping[str, float]
    examples: float
    bands: tuple[Band, ...]

    @property
    def perplexity(self) -> float:
        return _perplexity(self.loss)

    def to_json(self) -> dict[str, object]:
        """What `json.dumps` takes."""
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


@torch.no_grad()
def measure(model: Model, batches: Iterable[object]) -> Measured:
    """Evaluate a model on batches, once through.

    Raises:
        UserError: there is no example.
    """
    # Powers of ten: 0, 1 to 9, 10 to 99, …
    counts = model.plan.counts.to(model.device)
    band_of = torch.where(counts > 0, counts.clamp(min=1).log10().floor() + 1, 0).long()
    names = KINDS[model.plan.kind].metrics
    metrics = rank_metrics(model.head, names)
    sums = torch.zeros(int(band_of.max()) + 1, 2 + len(names), dtype=torch.float64, device=model.device)
    with evaluating(model):
        for item in batches:
            batch = Batch.of(item, model.device)
            hidden = model.encoder(batch.inputs)
            present = batch.target != IGNORED
            if not present.any():
                continue
            target, exclude = batch.target[present], None if batch.exclude is None else batch.exclude[present]
            loss = model.head.exact_loss(hidden[present], target, exclude=exclude, reduction="none").double()
            found = [metric(hidden, batch)[present] for metric in metrics.values()]
            weight = torch.ones_like(loss) if batch.weight is None else batch.weight[present].double()
            sums.index_add_(
                0, band_of[target], torch.stack([torch.ones_like(loss), loss, *found], 1) * weight.unsqueeze(1)
            )
    whole, *values = sums.sum(0).tolist()
    if whole == 0:
        raise UserError("`data` must hold examples of classes that the model knows, got none")
    bands = [_band(i, row, names) for i, row in enumerate(sums.tolist()) if row[0] > 0]
    loss_and_metrics = [value / whole for value in values]
    return Measured(loss_and_metrics[0], dict(zip(names, loss_and_metrics[1:], strict=True)), whole, tuple(bands))


def _band(power: int, sums: list[float], names: Sequence[str]) -> Band:
    low, high = (0, 0) if power == 0 else (10 ** (power - 1), 10**power - 1)
    examples, loss, *metrics = sums
    return Band(low, high, examples, loss / examples, {n: x / examples for n, x in zip(names, metrics, strict=True)})


def _perplexity(loss: float) -> float:
    # A loss beyond that has none that a float holds.
    return math.exp(min(loss, 700.0))
