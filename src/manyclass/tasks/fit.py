"""From a file to a trained model in a folder, that can be stopped at any moment and goes on where it was."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from manyclass import _check
from manyclass.errors import UserError
from manyclass.storage import write_json
from manyclass.tasks.began import (
    ABOUT,
    FORMAT,
    check_same,
    fingerprints,
    read_about,
    signed,
    source_kept,
    source_now,
)
from manyclass.tasks.kinds import KINDS
from manyclass.tasks.measure import Measured, measure
from manyclass.tasks.metrics import rank_metrics
from manyclass.tasks.model import Model
from manyclass.tasks.optimizers import make_optimizers, make_schedulers
from manyclass.tasks.restore import check_files, restore
from manyclass.tasks.settings import Settings
from manyclass.tasks.size import check_size
from manyclass.tasks.task import Source, Task, Watch, check_settings
from manyclass.training import (
    Batch,
    Callback,
    Checkpoints,
    CSVLog,
    DivergedError,
    HeldOut,
    History,
    Probe,
    Training,
    load_checkpoint,
)

_DATA = ".manyclass-data"
_LIMITS = ("epochs", "seconds")
# What decides when a training looks at itself.
_HOW = ("evaluate_every", "evaluate_seconds", "evaluated", "probe_every")


@dataclass(frozen=True)
class Fit:
    """How a training is run, beside what it learns. When it is evaluated decides which model is the best.

    Args:
        evaluate_every: steps between evaluations; None: an epoch.
        evaluate_seconds: seconds between evaluations, instead of steps.
        evaluated: examples of an evaluation while it trains, at most. The last one is of all.
        probe_every: steps between probes of the error of log Z̃; 0: none.
        checkpoint_every: seconds between checkpoints.
        device: where to. None: where it was, if it is resumed, and else the CPU.
        watch: told of bytes read, before the training.
        callbacks: of the training.

    Raises:
        TypeError, ValueError: steps, seconds or examples that are no numbers, or too small.
    """

    evaluate_every: int | None = None
    evaluate_seconds: float | None = None
    evaluated: int = 20_000
    probe_every: int = 200
    checkpoint_every: float = 60.0
    device: str | None = None
    watch: Watch | None = None
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        if self.evaluate_every is not None:
            _check.whole("evaluate_every", self.evaluate_every, 1)
        if self.evaluate_seconds is not None:
            _check.number("evaluate_seconds", self.evaluate_seconds, low=0, strict=True)
        _check.whole("evaluated", self.evaluated, 1)
        _check.whole("probe_every", self.probe_every, 0)


@dataclass(frozen=True)
class Fitted:
    """A training that ended, or was interrupted.

    Args:
        model: the best there was; the last where it was interrupted.
        history: of the training.
        measured: of all held-out examples; None where it was interrupted.
        about: what was read, in a few words each.
    """

    model: Model
    history: History
    measured: Measured | None
    about: Sequence[str]


def fit(
    kind: str, source: Source, settings: Settings, folder: Path, *, how: Fit, told: Callable[[Task], None] | None = None
) -> Fitted:
    """Train from the beginning.

    Args:
        kind: of the data, a key of `KINDS`.
        source: of the data.
        settings: of the model and its training.
        folder: where all of it goes; new, or empty.
        how: to run it.
        told: what was read, before the training begins.

    Raises:
        UserError: the folder holds something; the data cannot be read; no such model can be built.
    """
    for name in (ABOUT, "newest.safetensors", "best.safetensors"):
        if (folder / name).exists():
            raise UserError(
                f"`--out` must be a folder without a model, got {folder}, which has {name}: --resume goes on with it"
            )
    check_settings(kind, settings)
    settings = settings.over(KINDS[kind].defaults)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What a training that was killed while it read had left may go.
        foreign = next(
            (path.name for path in folder.iterdir() if path.name != _DATA and not path.name.startswith(ABOUT)), None
        )
    except OSError as error:
        raise UserError(f"`--out` must be a folder that can be made, got {folder}: {error.strerror}") from None
    if foreign is not None:
        raise UserError(f"`--out` must be a new or empty folder, got {folder}, which has {foreign}")
    with _spool(folder) as data:
        task = KINDS[kind].read(source, settings, data, how.watch)
        about = {
            "format": FORMAT,
            "kind": kind,
            "source": source_kept(source),
            "settings": settings.to_json(),
            "how": {name: getattr(how, name) for name in _HOW} | {"device": how.device or "cpu"},
            "files": fingerprints(source),
        }
        return train(task, folder, how, told=told, begun=lambda: write_json(folder / ABOUT, signed(about)))


def resume(
    folder: Path,
    *,
    kind: str | None = None,
    source: Source | None = None,
    given: Mapping[str, Any] | None = None,
    which: Literal["newest", "previous"] = "newest",
    how: Fit,
    told: Callable[[Task], None] | None = None,
) -> Fitted:
    """Go on with a training that was stopped.

    Args:
        folder: of the training.
        kind: of the data; None: what it was.
        source: where its data is now; None: where it was.
        given: settings, and fields of `Fit` that say when to evaluate and probe. Limits, epochs or seconds, may be
            others than it had; all else must be what it had.
        which: of its checkpoints.
        how: to run it; when to evaluate and probe is what it was.
        told: what was read, before the training goes on.

    Raises:
        UserError: there is no training, or its data is not the same any more; a checkpoint is damaged.
    """
    about = read_about(folder)
    try:
        settings = Settings.from_json(about.get("settings"))
    except UserError as error:
        raise UserError(f"cannot read {folder / ABOUT}: it is damaged: {error}") from None
    if kind not in (None, about["kind"]):
        raise UserError(f"`--{kind}` must be left out: the training in {folder} is of {about['kind']}")
    try:
        device = str(about["how"]["device"])
        how = replace(how, **{name: about["how"][name] for name in _HOW}, device=how.device or device)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"cannot read {folder / ABOUT}: it is damaged: it does not say when to evaluate") from None
    _check_device(how.device, device)
    for name, value in (given or {}).items():
        was = getattr(how if name in _HOW else settings, name)
        if name not in _LIMITS and value != was:
            raise UserError(f"`{name}` must be left out, or what it was when the training began, {was}, got {value}")
    if limits := {name: given[name] for name in _LIMITS if given and name in given}:
        settings = replace(settings, **{**dict.fromkeys(_LIMITS), **limits})
    kind = str(about["kind"])
    now = source_now(about["source"], source)
    check_same(now, about["files"])
    check_files(folder, which)

    def begun() -> None:
        # Who resumes it again need not say once more how long, and where its data is. Also where nothing has changed:
        # a folder that cannot be written to is told before the training.
        write_json(folder / ABOUT, signed({**about, "settings": settings.to_json(), "source": source_kept(now)}))

    newest = folder / f"{which}.safetensors"
    # Stopped before the first checkpoint, it begins anew.
    going = which if newest.exists() or which == "previous" else None
    with _spool(folder) as data:
        task = KINDS[kind].read(now, settings, data, how.watch)
        return train(task, folder, how, resume=going, told=told, begun=begun)


def _check_device(now: str | None, was: str) -> None:
    """Raise where a training cannot go on on a device: each kind has random numbers of its own."""
    try:
        if _check.place(now or was).type == torch.device(was).type:
            return
    except ValueError as error:
        raise UserError(str(error)) from None
    raise UserError(f"`device` must be left out, or of the kind it was when the training began, {was}, got {now}")


@contextmanager
def _spool(folder: Path) -> Iterator[Path]:
    """Where data that was read is kept while it is trained on, whatever happens no longer."""
    try:
        yield folder / _DATA
    finally:
        shutil.rmtree(folder / _DATA, ignore_errors=True)


def train(
    task: Task,
    folder: Path,
    how: Fit,
    *,
    resume: Literal["newest", "previous"] | None = None,
    told: Callable[[Task], None] | None = None,
    begun: Callable[[], None] | None = None,
) -> Fitted:
    """Train a task, or go on with it, in a folder that is there.

    Args:
        task: what to learn.
        folder: of its checkpoints and logs.
        how: to run it.
        resume: the checkpoint to go on from. None: from the beginning.
        told: what was read.
        begun: called when nothing is left that can be refused, before the first step.

    Raises:
        UserError: no such model can be built, or a checkpoint is refused.
    """
    plan = task.plan
    kind, settings = KINDS[plan.kind], plan.settings
    torch.manual_seed(settings.seed)
    try:
        check_size(plan, how.device or "cpu")
        model = Model(plan, kind.build(plan)).to(how.device or "cpu")
    except ValueError as error:
        raise UserError(str(error)) from error
    optimizers = make_optimizers(model)
    schedulers = make_schedulers(optimizers, settings, len(task.train))

    def state(training: Training) -> dict[str, Any]:
        return {
            "model": model.content(),
            "whole": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "training": training.state_dict(),
        }

    checkpoints = Checkpoints(folder, state, model=model.content, every=how.checkpoint_every, by=kind.best_by)
    log = CSVLog(folder / "log.csv", metrics=kind.metrics)
    training = Training(
        model.head,
        task.train,
        optimizers,
        encoder=model.encoder,
        schedulers=schedulers,
        epochs=settings.epochs,
        seconds=settings.seconds,
        held_out=HeldOut(
            task.held_out(how.evaluated),
            every=how.evaluate_every,
            seconds=how.evaluate_seconds,
            metrics=rank_metrics(model.head, kind.metrics),
            by=kind.best_by,
            patience=settings.patience,
        ),
        probe=Probe(every=how.probe_every) if how.probe_every else None,
        report_every=20,
        penalty=None if task.penalty is None else _penalty(task.penalty, model),
        clip=settings.clip,
        callbacks=[log, *how.callbacks, checkpoints],
        seed=settings.seed,
    )
    if resume is not None:
        restore(
            checkpoints.resume(resume),
            folder / f"{resume}.safetensors",
            model=model,
            optimizers=optimizers,
            schedulers=schedulers,
            training=training,
            batches=len(task.train),
        )
    _check_log(log)
    if begun is not None:
        begun()
    if told is not None:
        told(task)
    try:
        history = training.run()
    except DivergedError as error:
        kept = f"; {folder} keeps what was best" if (folder / "best.safetensors").exists() else ""
        raise UserError(f"{error}. Begin anew with a smaller `--learning-rate`, or with `--clip`{kept}") from error
    if history.stopped == "interrupted":
        return Fitted(model, history, None, task.about)
    for optimizer in optimizers:
        optimizer.zero_grad()
    # Into the same model: another one would have to fit beside it.
    if (folder / "best.safetensors").exists():
        model.load_parameters(load_checkpoint(folder, "best")[0])
    return Fitted(model, history, measure(model, task.held_out(None)), task.about)


def _check_log(log: CSVLog) -> None:
    try:
        log.check()
    except (ValueError, OSError) as error:
        raise UserError(f"cannot go on with the log: {error}; it may be moved away") from None


def _penalty(penalty: Callable[[Model, Any, Tensor], Tensor], model: Model) -> Callable[[Batch], Tensor]:
    return lambda batch: penalty(model, batch.inputs, batch.target)
