"""From a file to a trained model in a folder; the training can be stopped at any time and resumed."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from manyclass import _check
from manyclass.errors import UserError
from manyclass.storage import write_json
from manyclass.tasks.catalog import TASKS
from manyclass.tasks.manifest import (
    FORMAT,
    MANIFEST,
    check_fingerprints,
    fingerprints,
    read_manifest,
    source_from_json,
    source_to_json,
    with_digest,
)
from manyclass.tasks.restore import check_files
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import Source, TrainingData, check_settings
from manyclass.tasks.train import Fitted, RunOptions, train

SPOOL_FOLDER = ".manyclass-data"
_LIMITS = ("epochs", "seconds")
# The options that decide when a training is evaluated and probed; the manifest keeps them.
_KEPT_OPTIONS = ("evaluate_every", "evaluate_seconds", "evaluated", "probe_every")


def fit(
    kind: str,
    source: Source,
    settings: Settings,
    folder: Path,
    *,
    options: RunOptions,
    on_read: Callable[[TrainingData], None] | None = None,
) -> Fitted:
    """Train from the beginning.

    Args:
        kind: kind of data, a key of `TASKS`.
        source: source of the data.
        settings: settings of the model and its training.
        folder: for checkpoints, logs and the manifest; new or empty.
        options: options of the run.
        on_read: called with the data before the training starts.

    Raises:
        UserError: the folder is not empty, the data cannot be read, or the model cannot be built.
    """
    for name in (MANIFEST, "newest.safetensors", "best.safetensors"):
        if (folder / name).exists():
            raise UserError(
                f"`--out` must be a folder without a model, got {folder}, which has {name}: --resume goes on with it"
            )
    task = TASKS[kind]
    check_settings(task, settings)
    settings = settings.over(task.defaults)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Leftovers of a training that was killed while it read its data may be overwritten.
        foreign = next(
            (p.name for p in folder.iterdir() if p.name != SPOOL_FOLDER and not p.name.startswith(MANIFEST)), None
        )
    except OSError as error:
        raise UserError(f"`--out` must be a folder that can be made, got {folder}: {error.strerror}") from None
    if foreign is not None:
        raise UserError(f"`--out` must be a new or empty folder, got {folder}, which has {foreign}")
    with _spool(folder) as spool:
        data = task.read(source, settings, spool, options.progress)
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "source": source_to_json(source),
            "settings": settings.to_json(),
            "options": {name: getattr(options, name) for name in _KEPT_OPTIONS} | {"device": options.device or "cpu"},
            "files": fingerprints(source),
        }
        return train(data, folder, options, on_read=on_read, on_start=lambda: _write(folder, manifest))


def resume(
    folder: Path,
    *,
    kind: str | None = None,
    source: Source | None = None,
    given: Mapping[str, Any] | None = None,
    checkpoint: Literal["newest", "previous"] = "newest",
    options: RunOptions,
    on_read: Callable[[TrainingData], None] | None = None,
) -> Fitted:
    """Resume a training that was stopped.

    Args:
        folder: folder of the training.
        kind: kind of data; None: as before.
        source: the present location of the data; None: as before.
        given: settings, and fields of `RunOptions` that decide when to evaluate and probe. The limits, epochs or
            seconds, may differ from before; everything else must be the same.
        checkpoint: checkpoint to resume from.
        options: options of the run; evaluations and probes are scheduled as before.
        on_read: called with the data before the training goes on.

    Raises:
        UserError: there is no training in the folder, its data or an option has changed, or a checkpoint is damaged.
    """
    manifest = read_manifest(folder)
    kept_kind = str(manifest["kind"])
    if kind not in (None, kept_kind):
        raise UserError(f"`--{kind}` must be left out: the training in {folder} is of {kept_kind}")
    settings, options = _kept_options(manifest, folder, options)
    for name, value in (given or {}).items():
        before = getattr(options if name in _KEPT_OPTIONS else settings, name)
        if name not in _LIMITS and value != before:
            raise UserError(f"`{name}` must be left out, or what it was when the training began, {before}, got {value}")
    if limits := {name: given[name] for name in _LIMITS if given and name in given}:
        settings = replace(settings, **{**dict.fromkeys(_LIMITS), **limits})
    source = source_from_json(manifest["source"], source)
    check_fingerprints(source, manifest["files"])
    check_files(folder, checkpoint)
    # New limits and paths are kept for the next resume. The manifest is written even if nothing has changed, so that
    # a read-only folder is refused before the training.
    changed = {**manifest, "settings": settings.to_json(), "source": source_to_json(source)}
    # A training that was stopped before its first checkpoint starts from the beginning.
    exists = (folder / f"{checkpoint}.safetensors").exists()
    with _spool(folder) as spool:
        data = TASKS[kept_kind].read(source, settings, spool, options.progress)
        return train(
            data,
            folder,
            options,
            resume=checkpoint if exists or checkpoint == "previous" else None,
            on_read=on_read,
            on_start=lambda: _write(folder, changed),
        )


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_json(folder / MANIFEST, with_digest(manifest))


def _kept_options(manifest: Mapping[str, Any], folder: Path, options: RunOptions) -> tuple[Settings, RunOptions]:
    """Return the settings in a manifest, and the options with those that the manifest keeps."""
    try:
        settings = Settings.from_json(manifest.get("settings"))
    except UserError as error:
        raise UserError(f"cannot read {folder / MANIFEST}: it is damaged: {error}") from None
    try:
        kept = manifest["options"]
        device = str(kept["device"])
        options = replace(options, **{name: kept[name] for name in _KEPT_OPTIONS}, device=options.device or device)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"cannot read {folder / MANIFEST}: it is damaged: it does not say when to evaluate") from None
    _check_device(options.device, device)
    return settings, options


def _check_device(now: str | None, before: str) -> None:
    """Check that a training resumes on a device of the same type: each type has another random number generator."""
    try:
        if _check.available_device(now or before).type == torch.device(before).type:
            return
    except ValueError as error:
        raise UserError(str(error)) from None
    raise UserError(f"`device` must be left out, or of the type it was when the training began, {before}, got {now}")


@contextmanager
def _spool(folder: Path) -> Iterator[Path]:
    """Yield a folder for the data read, and remove it at the end."""
    try:
        yield folder / SPOOL_FOLDER
    finally:
        shutil.rmtree(folder / SPOOL_FOLDER, ignore_errors=True)
