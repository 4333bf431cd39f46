"""Progress, records and outcome of a training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Stopped = Literal["epochs", "steps", "seconds", "patience", "batches", "interrupted", "failed"]


@dataclass(frozen=True)
class Progress:
    """The position of a training.

    Args:
        step: steps taken.
        epoch: epochs completed.
        position: batches seen of the current epoch.
        examples: targets seen, ignored ones included.
        seconds: seconds of training, without evaluations and callbacks.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    examples: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """The measurements after a step.

    Args:
        step, epoch, examples, seconds: as in `Progress`.
        loss: training loss, smoothed: the mean of the first 50 steps, then an exponential moving average (2% a step).
        held_out_loss: exact negative log likelihood of a held-out example; None without an evaluation.
        metrics: the user's, by name; empty without an evaluation.
        rmse_log_z: root-mean-square error of log Z̃ over the last eight probes; None if there was none since the record
            before, or if the objective has no Z̃.
        seconds_left: seconds until the first limit at the pace so far; None if unknown.
        decision: a sentence, if the sampler has changed its design: what was measured, what was chosen.
    """

    step: int
    epoch: int
    examples: int
    seconds: float
    loss: float
    held_out_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    rmse_log_z: float | None = None
    seconds_left: float | None = None
    decision: str | None = None


def cost(record: Record, by: str) -> float:
    """Return the loss of an evaluation, or minus a metric; inf for NaN, so that it is never the best."""
    value = record.held_out_loss if by == "loss" else -record.metrics.get(by, math.nan)
    return math.inf if value is None or math.isnan(value) else value


@dataclass(frozen=True)
class History:
    """The outcome of `Training.run`.

    Args:
        records: in order. At the end of an epoch two may be of the same step: a report, then an evaluation.
        progress: at the end of the training.
        best_step, best_loss: step and held-out loss of the best evaluation; None without an evaluation.
        stopped: the limit reached ("epochs", "steps", "seconds"); "patience"; "batches": an iterator ran out first;
            "interrupted"; or "failed", which only callbacks see, because the error is raised.
        spent: seconds by phase: "batches" (waiting for them), "forward", "update" (gradients and optimisers),
            "evaluation", "callbacks". A GPU runs asynchronously, so the phase that syncs pays for it.
        best_by: the criterion of the best evaluation: "loss", or the name of a metric.
    """

    records: tuple[Record, ...]
    progress: Progress
    best_step: int | None
    best_loss: float | None
    stopped: Stopped
    spent: Mapping[str, float] = field(default_factory=dict)
    best_by: str = "loss"
