"""From a file to a trained model in a folder; the training can be stopped at any time and resumed."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from manyclass import _check
from manyclass.data import Share
from manyclass.errors import UserError
from manyclass.storage import read_text, write_json
from manyclass.tasks.catalog import TASKS
from manyclass.tasks.lock import LOCK, locked
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
from manyclass.tasks.metrics import check_at
from manyclass.tasks.restore import check_files
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import Source, Task, TrainingData, check_settings
from manyclass.tasks.train import Fitted, RunOptions, train
from manyclass.training import Ranks

SPOOL_FOLDER = ".manyclass-data"
# The tag of https://bford.info/cachedir, which backups leave out; no other program writes the second line.
SPOOL_TAG = "CACHEDIR.TAG"
SPOOL_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by manyclass fit, and removed at its end.\n"
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
        UserError: the folder is not empty, another training holds it, the data cannot be read, the model cannot be
            built, or a k of `at` is above the number of classes.
    """
    task = TASKS[kind]
    check_settings(task, settings)
    at, settings = settings.at, settings.over(task.defaults)
    ranks = options.ranks
    ranks.by_first(lambda: _make(folder))
    with _held(folder, ranks, check=_check_new) as spool:
        data = _read(task, source, settings, spool, options)
        # Only a k that was chosen: a default may be above a small number of classes.
        check_at(at, len(data.spec.names))

        def start() -> None:
            _write(
                folder,
                {
                    "format": FORMAT,
                    "kind": kind,
                    "source": source_to_json(source),
                    "settings": settings.to_json(),
                    "options": {name: getattr(options, name) for name in _KEPT_OPTIONS}
                    | {"device": options.device or "cpu"},
                    "files": fingerprints(source),
                },
            )

        return train(data, folder, options, on_read=on_read, on_start=start)


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
        UserError: there is no training in the folder, another process is training in it, its data or an option has
            changed, or a checkpoint is damaged.
    """
    ranks = options.ranks
    # A folder without a training is refused before a lock is written into it.
    ranks.together(lambda: read_manifest(folder))
    with _held(folder, ranks) as spool:

        def checked() -> tuple[dict[str, Any], Source, Settings, RunOptions]:
            return _changed(folder, kind, source, given or {}, options)

        manifest, source, settings, options = ranks.together(checked)
        ranks.by_first(lambda: check_files(folder, checkpoint))
        # A training that was stopped before its first checkpoint starts from the beginning.
        exists = ranks.of_first((folder / f"{checkpoint}.safetensors").exists())
        data = _read(TASKS[manifest["kind"]], source, settings, spool, options)
        return train(
            data,
            folder,
            options,
            resume=checkpoint if exists or checkpoint == "previous" else None,
            on_read=on_read,
            on_start=lambda: _write(folder, manifest),
        )


def _changed(
    folder: Path, kind: str | None, source: Source | None, given: Mapping[str, Any], options: RunOptions
) -> tuple[dict[str, Any], Source, Settings, RunOptions]:
    """Return the manifest of a training that is resumed, with new limits and paths, and what it says."""
    manifest = read_manifest(folder)
    kept_kind = str(manifest["kind"])
    if kind not in (None, kept_kind):
        raise UserError(f"`--{kind}` must be left out: the training in {folder} is of {kept_kind}")
    settings, options = _kept_options(manifest, folder, options)
    for name, value in given.items():
        before = getattr(options if name in _KEPT_OPTIONS else settings, name)
        if name not in _LIMITS and value != before:
            raise UserError(f"`{name}` must be left out, or what it was when the training began, {before}, got {value}")
    if limits := {name: given[name] for name in _LIMITS if name in given}:
        settings = replace(settings, **{**dict.fromkeys(_LIMITS), **limits})
    source = source_from_json(manifest["source"], source)
    check_fingerprints(source, manifest["files"])
    # New limits and paths are kept for the next resume. The manifest is written even if nothing has changed, so that
    # a read-only folder is refused before the training.
    changed = {**manifest, "settings": settings.to_json(), "source": source_to_json(source)}
    return changed, source, settings, options


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"`--out` must be a folder that can be made, got {folder}: {error.strerror}") from None


@contextmanager
def _held(folder: Path, ranks: Ranks, *, check: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Lock a folder and yield one inside it for the data that this process reads.

    The first process holds the lock for all.

    Raises:
        UserError: another training holds the lock, `check` refuses the folder, or it cannot be written to.
    """
    with ExitStack() as stack:

        def enter() -> Path:
            stack.enter_context(locked(folder))
            if check is not None:
                check(folder)
            return stack.enter_context(_spool(folder))

        spool = ranks.by_first(enter)
        yield folder / SPOOL_FOLDER / str(ranks.rank) if spool is None else spool


def _read(task: Task, source: Source, settings: Settings, spool: Path, options: RunOptions) -> TrainingData:
    """Read the data on all processes, each for its share of the batches."""
    share, progress = Share(options.ranks.rank, options.ranks.number), options.progress

    def read() -> TrainingData:
        spool.mkdir(exist_ok=True)
        return task.read(source, settings, spool, progress, share)

    return options.ranks.together(read)


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


def _check_new(folder: Path) -> None:
    """Check that a folder holds nothing but leftovers of a training that was killed while it read its data.

    Raises:
        UserError: the folder has a model or other files.
    """
    try:
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UserError(f"`--out` must be a folder that can be read, got {folder}: {error.strerror}") from None
    for name in (MANIFEST, "newest.safetensors", "best.safetensors"):
        if name in present:
            raise UserError(
                f"`--out` must be a folder without a model, got {folder}, which has {name}: --resume goes on with it"
            )
    for name in present:
        if name not in (SPOOL_FOLDER, LOCK) and not name.startswith(f"{MANIFEST}.tmp-"):
            raise UserError(f"`--out` must be a new or empty folder, got {folder}, which has {name}")


@contextmanager
def _spool(folder: Path) -> Iterator[Path]:
    """Yield a new folder for the data read, and remove it at the end.

    Raises:
        UserError: there is a folder of this name that no training made, or it cannot be made.
    """
    path = folder / SPOOL_FOLDER
    try:
        if os.path.lexists(path):
            if not _is_spool(path):
                raise UserError(
                    f"`--out` must hold no {SPOOL_FOLDER} that `manyclass fit` did not make, got {path}: move it away"
                )
            shutil.rmtree(path)
        path.mkdir()
        (path / SPOOL_TAG).write_text(SPOOL_SIGNATURE)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _is_spool(path: Path) -> bool:
    """Return True if a training made this folder and was killed, so that it may be removed."""
    if path.is_symlink() or not path.is_dir():
        return False
    present = [entry.name for entry in path.iterdir()]
    try:
        tag = read_text(path / SPOOL_TAG, max_bytes=len(SPOOL_SIGNATURE)) if SPOOL_TAG in present else ""
    except (UserError, ValueError):
        return False
    # A training may be killed before it has written the tag, and then has written nothing else.
    return tag == SPOOL_SIGNATURE or (SPOOL_SIGNATURE.startswith(tag) and set(present) <= {SPOOL_TAG})
