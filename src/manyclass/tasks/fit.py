"""From a file to a trained model in a folder, that can be stopped at any moment and goes on where it was."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from manyclass.by_name import OPTIMIZERS, RATES
from manyclass.errors import UserError
from manyclass.storage import write_json
from manyclass.tasks.kinds import KINDS
from manyclass.tasks.measure import Measured, measure
from manyclass.tasks.metrics import rank_metrics
from manyclass.tasks.model import Model, model_of, open_model
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import Source, Task, Watch
from manyclass.training import (
    Batch,
    Callback,
    Checkpoints,
    CSVLog,
    HeldOut,
    History,
    Probe,
    Training,
)

FORMAT = 1
_ABOUT, _DATA = "fit.json", "data"
_LIMITS = ("epochs", "seconds")
_HOW = ("evaluate_every", "evaluated", "probe_every")  # what decides when a training looks at itself
_EDGE = 1 << 20  # bytes at each end of a file that tell it from another


@dataclass(frozen=True)
class Fit:
    """How a training is run, beside what it learns: none of it changes the model.

    Args:
        evaluate_every: steps between evaluations; None: an epoch.
        evaluated: examples of an evaluation while it trains, at most. The last one is of all.
        probe_every: steps between probes of the error of log Z̃; 0: none.
        checkpoint_every: seconds between checkpoints.
        device: where to.
        watch: told of bytes read, before the training.
        callbacks: of the training.
    """

    evaluate_every: int | None = None
    evaluated: int = 20_000
    probe_every: int = 200
    checkpoint_every: float = 60.0
    device: str = "cpu"
    watch: Watch | None = None
    callbacks: Sequence[Callback] = ()


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
        folder: where all of it goes; it must hold no training yet.
        how: to run it.
        told: what was read, before the training begins.

    Raises:
        UserError: the folder holds a training; the data cannot be read.
    """
    for name in (_ABOUT, "newest.safetensors", "best.safetensors"):
        if (folder / name).exists():
            raise UserError(
                f"`--out` must be a folder without a model, got {folder}, which has {name}: --resume goes on with it"
            )
    settings = settings.over(KINDS[kind].defaults)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"`--out` must be a folder that can be made, got {folder}: {error.strerror}") from None
    task = _read(kind, source, settings, folder, how.watch)
    about = {
        "format": FORMAT,
        "kind": kind,
        "source": {name: None if value is None else str(value) for name, value in asdict(source).items()},
        "settings": settings.to_json(),
        "how": {name: getattr(how, name) for name in _HOW},
        "files": _fingerprints(source),
    }
    write_json(folder / _ABOUT, about)
    return train(task, folder, how, told=told)


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
        given: settings. Limits, epochs or seconds, may be others than it had; all else must be what it had.
        which: of its checkpoints.
        how: to run it.
        told: what was read, before the training goes on.

    Raises:
        UserError: there is no training, or its data is not the same any more; a checkpoint is damaged.
    """
    about = read_about(folder)
    settings = Settings.from_json(about["settings"])
    if kind not in (None, about["kind"]):
        raise UserError(f"`--{kind}` must be left out: the training in {folder} is of {about['kind']}")
    for name, value in (given or {}).items():
        if name not in _LIMITS and value != getattr(settings, name):
            raise UserError(
                f"`{name}` must be left out, or what it was when the training began, {getattr(settings, name)}, "
                f"got {value}"
            )
    if limits := {name: given[name] for name in _LIMITS if given and name in given}:
        settings = replace(settings, **{**dict.fromkeys(_LIMITS), **limits})
    try:
        how = replace(how, **{name: about["how"][name] for name in _HOW})
    except (KeyError, TypeError):
        raise UserError(f"cannot read {folder / _ABOUT}: it is damaged: it does not say when to evaluate") from None
    kind = str(about["kind"])
    own = {name: value for name, value in about["source"].items() if value is not None}
    paths = {name: Path(own[name]) for name in ("data", "held_out", "labels") if name in own}
    if source is not None:
        paths |= {"data": source.data}
    numbers = {"min_count": int(own["min_count"])} if "min_count" in own else {}
    source = Source(**{**own, **paths, **numbers})
    for name, (was, now) in _pairs(about["files"], _fingerprints(source)).items():
        if was != now:
            raise UserError(
                f"`{name}` must be what the training began with, got {getattr(source, name)}, which differs"
            )
    task = _read(kind, source, settings, folder, how.watch)
    newest = folder / f"{which}.safetensors"
    # Stopped before the first checkpoint, it begins anew.
    return train(task, folder, how, resume=which if newest.exists() or which == "previous" else None, told=told)


def read_about(folder: Path) -> dict[str, Any]:
    """What a training began with.

    Raises:
        UserError: the folder holds none, or a damaged or newer one.
    """
    path = folder / _ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"`MODEL` must be a folder that `manyclass fit` made, got {folder}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"cannot read {path}: it is damaged: it is no JSON") from None
    good = isinstance(about, dict) and isinstance(about.get("format"), int)
    if good and about["format"] > FORMAT:
        raise UserError(
            f"cannot read {path}: it was written by a newer version, format {about['format']}; this one reads up to "
            f"{FORMAT}: upgrade manyclass"
        )
    source = about.get("source") if good else None
    names = set(Source.__dataclass_fields__)
    if (
        not isinstance(source, dict)
        or not set(source) <= names
        or not isinstance(source.get("data"), str)
        or about.get("kind") not in KINDS
        or not isinstance(about.get("files"), dict)
    ):
        raise UserError(f"cannot read {path}: it is damaged: it does not tell of a training")
    return about  # type: ignore[no-any-return]


def _read(kind: str, source: Source, settings: Settings, folder: Path, watch: Watch | None) -> Task:
    try:
        return KINDS[kind].read(source, settings, folder / _DATA, watch)
    except BaseException:
        shutil.rmtree(folder / _DATA, ignore_errors=True)
        raise


def train(
    task: Task,
    folder: Path,
    how: Fit,
    *,
    resume: Literal["newest", "previous"] | None = None,
    told: Callable[[Task], None] | None = None,
) -> Fitted:
    """Train a task, or go on with it, in a folder that is there."""
    plan = task.plan
    kind, settings = KINDS[plan.kind], plan.settings
    if told is not None:
        told(task)
    torch.manual_seed(settings.seed)
    model = Model(plan, kind.build(plan)).to(how.device)
    optimizers = make_optimizers(model)
    schedulers = make_schedulers(optimizers, settings, len(task.train))
    parts: dict[str, Any] = {}

    def state() -> dict[str, Any]:
        return {
            "model": model.content(),
            "whole": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "training": parts["training"].state_dict(),
        }

    checkpoints = Checkpoints(folder, state, model=model.content, every=how.checkpoint_every, by=kind.best_by)
    training = parts["training"] = Training(
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
            metrics=rank_metrics(model.head, kind.metrics),
            by=kind.best_by,
            patience=settings.patience,
        ),
        probe=Probe(every=how.probe_every) if how.probe_every else None,
        report_every=20,
        penalty=None if task.penalty is None else _penalty(task.penalty, model),
        clip=settings.clip,
        callbacks=[CSVLog(folder / "log.csv", metrics=kind.metrics), *how.callbacks, checkpoints],
        seed=settings.seed,
    )
    if resume is not None:
        _load(checkpoints.resume(resume), folder / f"{resume}.safetensors", model, optimizers, schedulers, training)
    history = training.run()
    if history.stopped == "interrupted":
        return Fitted(model, history, None, task.about)
    best = open_model(folder, device=how.device)
    measured = measure(best, task.held_out(None))
    shutil.rmtree(folder / _DATA, ignore_errors=True)
    return Fitted(best, history, measured, task.about)


def _load(
    state: dict[str, Any],
    path: Path,
    model: Model,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LambdaLR],
    training: Training,
) -> None:
    try:
        saved = model_of(state["model"], path).plan
        if list(saved.names) != list(model.names) or not torch.equal(saved.counts, model.plan.counts):
            raise UserError(f"`data` must be what the training began with, got other classes than {path} has")
        model.load_state_dict(state["whole"])
        for optimizer, own in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        for scheduler, own in zip(schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        training.load_state_dict(state["training"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot go on from {path}: it is of another training: {reason}") from None


def make_optimizers(model: Model) -> list[Optimizer]:
    """One for the rows of classes and inputs, whose gradients are of touched rows alone, and one for all else."""
    settings = model.plan.settings
    rows = {id(p): p for p in model.head.parameters()} | {id(p): p for p in _sparse(model.encoder)}
    others = [p for p in model.encoder.parameters() if id(p) not in rows]
    name = settings.optimizer or "adagrad"
    made = [OPTIMIZERS[name](rows.values(), settings.rate or RATES[name])]
    return [*made, torch.optim.Adam(others, settings.network_rate or 0.001)] if others else made


def make_schedulers(optimizers: Sequence[Optimizer], settings: Settings, batches: int) -> list[LambdaLR]:
    """Rates that fall to 0 by the last epoch, where it is known and wanted."""
    if not settings.decay or settings.epochs is None:
        return []
    steps = settings.epochs * batches
    return [LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)) for optimizer in optimizers]


def _sparse(encoder: nn.Module) -> Iterable[nn.Parameter]:
    for module in encoder.modules():
        if isinstance(module, nn.Embedding) and module.sparse:
            yield module.weight
        elif callable(given := getattr(module, "sparse_parameters", None)):
            yield from given()


def _penalty(penalty: Callable[[Model, Any, Tensor], Tensor], model: Model) -> Callable[[Batch], Tensor]:
    return lambda batch: penalty(model, batch.inputs, batch.target)


def _fingerprints(source: Source) -> dict[str, str]:
    """What tells the data from another: sizes and the bytes at both ends of each file."""
    found = {}
    for name in ("data", "held_out", "labels"):
        path = getattr(source, name)
        if path is not None:
            files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
            digest = hashlib.sha256()
            for file in files:
                digest.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size}\n".encode())
                with file.open("rb") as opened:
                    digest.update(opened.read(_EDGE))
                    opened.seek(max(0, file.stat().st_size - _EDGE))
                    digest.update(opened.read(_EDGE))
            found[name] = digest.hexdigest()
    return found


def _pairs(was: dict[str, str], now: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {name: (was.get(name), now.get(name)) for name in {**was, **now}}
