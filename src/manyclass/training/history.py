"""What a training has to tell: where it is, what it measured, how it ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Stopped = Literal["epochs", "steps", "seconds", "patience", "batches", "interrupted", "failed"]


@dataclass(frozen=True)
class Progress:
    """Where a training is.

    Args:
        step: steps taken.
        epoch: epochs completed.
        position: batches seen of the epoch that is under way.
        examples: targets seen, ignored ones included.
        seconds: spent on training; evaluations, probes and callbacks do not count.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    examples: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """What was measured after a step.

    Args:
        step, epoch, examples, seconds: as in `Progress`.
        loss: of training, smoothed: the mean of the first 50 steps, then an average that forgets 2% a step.
        held_out_loss: the exact negative log likelihood of a held-out example; None where there was no evaluation.
        metrics: the user's, by name; empty where there was no evaluation.
        rmse_log_z: the error of log Z̃; None where there was no probe, or the objective has no Z̃.
        seconds_left: until the first limit, at the pace so far; None where that is unknown.
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


def cost(record: Record, by: str) -> float:
    """What an evaluation is judged by, the less the better: its "loss", or minus a metric; infinite if it is NaN."""
    value = record.held_out_loss if by == "loss" else -record.metrics.get(by, math.nan)
    return math.inf if value is None or math.isnan(value) else value


@dataclass(frozen=True)
class History:
    """What `Training.run` returns.

    Args:
        records: in order. At the end of an epoch two may be of the same step: a report and then an evaluation.
        progress: where the training ended.
        best_step, best_loss: the best evaluation and its held-out loss; None where there was none.
        stopped: the limit that was reached ("epochs", "steps", "seconds"); "patience"; "batches", an iterator that ran
            out before; "interrupted"; or "failed", which only callbacks see, for the error is raised.
        spent: seconds by what they were spent on: "batches", waiting for them; "forward"; "update", gradients and
            optimisers; "evaluation"; "probes"; "callbacks". A GPU works on meanwhile: what waits for it pays.
    """

    records: tuple[Record, ...]
    progress: Progress
    best_step: int | None
    best_loss: float | None
    stopped: Stopped
    spent: Mapping[str, float] = field(default_factory=dict)
