"""The training of a task in a folder that exists."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from manyclass import _check
from manyclass.errors import UserError
from manyclass.tasks.divide import divide, whole
from manyclass.tasks.measure import Measured, measure
from manyclass.tasks.metrics import best_by, metric_names, rank_metrics
from manyclass.tasks.model import Model
from manyclass.tasks.optimizers import make_optimizers, make_schedulers
from manyclass.tasks.restore import Run, check, restore
from manyclass.tasks.size import check_size
from manyclass.tasks.task import ModelSpec, ReadProgress, TrainingData
from manyclass.training import (
    ALONE,
    Callback,
    Checkpoints,
    CSVLog,
    HeldOut,
    History,
    Ranks,
    Training,
    fast_products,
    load_checkpoint,
)

_REPORT_STEPS = 20  # steps between records of the training loss


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are not settings of the model; the schedule of evaluations affects which model is the best.

    Args:
        evaluate_every: steps between evaluations; None: an epoch.
        evaluate_seconds: seconds between evaluations, instead of steps.
        evaluated: most held-out examples per evaluation during the training. The last evaluation uses all.
        probe_every: steps between recorded probes of the error of log Z̃; None: as often as costs 1 %; 0: none.
        checkpoint_every: seconds between checkpoints.
        device: device of the model. None: the same as before when resuming, else the CPU.
        progress: called with the bytes read and their total, before the training.
        watched: called with the batches of the last evaluation, returns them; to show its progress.
        callbacks: callbacks of the training, on the first process alone.
        ranks: the processes that train together.

    Raises:
        TypeError: an option that must be a number is not one.
        ValueError: a number of steps, seconds or examples is too small.
    """

    evaluate_every: int | None = None
    evaluate_seconds: float | None = None
    evaluated: int = 20_000
    probe_every: int | None = None
    checkpoint_every: float = 60.0
    device: str | None = None
    progress: ReadProgress | None = None
    watched: Callable[[Iterable[object]], Iterable[object]] = iter
    callbacks: Sequence[Callback] = ()
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        if self.evaluate_every is not None:
            _check.integer("evaluate_every", self.evaluate_every, 1)
        if self.evaluate_seconds is not None:
            _check.number("evaluate_seconds", self.evaluate_seconds, low=0, strict=True)
            if self.evaluate_every is not None:
                raise ValueError(
                    f"`evaluate_seconds` must be None if `evaluate_every` is given, got {self.evaluate_seconds}"
                )
        _check.integer("evaluated", self.evaluated, 1)
        if self.probe_every is not None:
            _check.integer("probe_every", self.probe_every, 0)


@dataclass(frozen=True)
class Fitted:
    """The outcome of a training that ended or was interrupted.

    Args:
        model: the best one; the last one if the training was interrupted.
        history: history of the training.
        measured: its evaluation on all held-out examples; None if the training was interrupted.
        summary: a few lines that describe the data.
    """

    model: Model
    history: History
    measured: Measured | None
    summary: Sequence[str]


def train(
    data: TrainingData,
    folder: Path,
    options: RunOptions,
    *,
    resume: Literal["newest", "previous"] | None = None,
    on_read: Callable[[TrainingData], None] | None = None,
    on_start: Callable[[], None] | None = None,
) -> Fitted:
    """Train a model on data, or resume its training.

    Args:
        data: data to train on.
        folder: for checkpoints and logs.
        options: options of the run.
        resume: the checkpoint to resume from. None: start from the beginning.
        on_read: called with the data before the first step.
        on_start: called before the first step, when nothing is left that can be refused.

    Raises:
        UserError: the model cannot be built, a checkpoint is refused, or the training diverged.
    """
    ranks = options.ranks
    log = CSVLog(folder / "log.csv", metrics=metric_names(data.spec))
    run, checkpoints = _assemble(data, folder, options, log)
    if resume is not None:
        path = folder / f"{resume}.safetensors"
        # Each process reads all rows to take its own.
        restore(run, ranks.in_turn(lambda: check(run, checkpoints.resume(resume), path)), path)

    def begin() -> None:
        try:
            log.check()
        except (ValueError, OSError) as error:
            raise UserError(f"cannot go on with the log: {error}; it may be moved away") from None
        if on_start is not None:
            on_start()
        if on_read is not None:
            on_read(data)

    ranks.by_first(begin)
    best = folder / "best.safetensors"
    try:
        # The last evaluation, below, and those of `evaluate` are in full precision.
        with fast_products(run.model.device):
            history = run.training.run()
    except _check.DivergedError as error:
        kept = f"; {folder} keeps the best model" if best.exists() else ""
        raise UserError(f"{error}. Start again with a smaller `--learning-rate`, or with `--clip`{kept}") from error
    if history.stopped == "interrupted":
        return Fitted(run.model, history, None, data.summary)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    # The best parameters are loaded into the same model, because a second one may not fit into memory.
    if ranks.of_first(best.exists()):
        ranks.in_turn(lambda: run.model.load_parameters(load_checkpoint(folder, "best")[0]))
    measured = measure(run.model, options.watched(data.held_out(None)), ranks=ranks)
    return Fitted(run.model, history, measured, data.summary)


def _assemble(data: TrainingData, folder: Path, options: RunOptions, log: CSVLog) -> tuple[Run, Checkpoints]:
    """Build the model and everything that trains it."""
    settings, by, ranks = data.spec.settings, best_by(data.spec), options.ranks
    torch.manual_seed(settings.seed)
    model = _build_model(data.spec, options.device or "cpu", divisible=ranks.are_several)
    encoder = divide(model, ranks, options.device or "cpu")
    optimizers = make_optimizers(model)
    schedulers = make_schedulers(optimizers, settings, len(data.train))

    def content() -> dict[str, Any]:
        return whole(model.content(), ranks)

    def state(training: Training) -> dict[str, Any]:
        parts = {
            "model": model.content(),
            "state_dict": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "training": training.state_dict(),
        }
        return whole(parts, ranks)

    checkpoints = Checkpoints(folder, state, model=content, every=options.checkpoint_every, by=by, ranks=ranks)
    penalty = data.penalty
    training = Training(
        model.head,
        data.train,
        optimizers,
        encoder=encoder,
        schedulers=schedulers,
        epochs=settings.epochs,
        seconds=settings.seconds,
        held_out=HeldOut(
            data.held_out(options.evaluated),
            every=options.evaluate_every,
            seconds=options.evaluate_seconds,
            metrics=rank_metrics(model.head, metric_names(data.spec)),
            by=by,
            patience=settings.patience,
        ),
        probe_every=options.probe_every,
        report_every=_REPORT_STEPS,
        penalty=None if penalty is None else lambda batch: penalty(model.encoder, batch.inputs, batch.target),
        clip=settings.clip,
        callbacks=[*((log, *options.callbacks) if ranks.is_first else ()), checkpoints],
        seed=settings.seed,
        ranks=ranks,
    )
    return Run(model, optimizers, schedulers, training, len(data.train)), checkpoints


def _build_model(spec: ModelSpec, device: str, *, divisible: bool) -> Model:
    try:
        check_size(spec, device)
        return Model(spec, divisible=divisible)
    except ValueError as error:
        raise UserError(str(error)) from error
