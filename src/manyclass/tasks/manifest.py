"""The manifest of a training: data, settings and options it started with, as a file in its folder."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyclass.errors import UserError
from manyclass.storage import read_text
from manyclass.tasks.catalog import TASKS
from manyclass.tasks.task import Source

FORMAT = 2
MANIFEST = "fit.json"
_MAX_BYTES = 1 << 20
_PATH_FIELDS = ("data", "held_out", "labels")
_HASHED_BYTES = 1 << 20  # at each end of a file


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a training.

    Raises:
        UserError: the folder has no manifest, or one that is damaged or of another version.
    """
    path = folder / MANIFEST
    try:
        text = read_text(path, max_bytes=_MAX_BYTES)
        manifest = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except OSError as error:
        raise UserError(f"`MODEL` must be a folder that `manyclass fit` made, got {folder}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"cannot read {path}: it is damaged: it is no JSON") from None
    good = isinstance(manifest, dict) and isinstance(manifest.get("format"), int)
    if good and manifest["format"] > FORMAT:
        raise UserError(
            f"cannot read {path}: it was written by a newer version, format {manifest['format']}; this one reads up to "
            f"{FORMAT}: upgrade manyclass"
        )
    if good and manifest["format"] < FORMAT:
        raise UserError(f"cannot read {path}: it was written by an earlier version of manyclass; train it again")
    source = manifest.get("source") if good else None
    names = set(Source.__dataclass_fields__)
    if (
        not isinstance(source, dict)
        or not set(source) <= names
        or not isinstance(source.get("data"), str)
        or not all(value is None or (isinstance(value, str) and value) for value in source.values())
        or not str(source.get("min_count") or 1).isdecimal()
        or manifest.get("kind") not in list(TASKS)
        or not isinstance(manifest.get("files"), dict)
    ):
        raise UserError(f"cannot read {path}: it is damaged: it does not describe a training")
    if with_digest(manifest) != manifest:
        raise UserError(f"cannot read {path}: it is damaged: its digest is another than when it was written")
    return manifest  # type: ignore[no-any-return]


def _finite(text: str) -> float:
    """Return a number of JSON, which may be written too large for a float."""
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _refuse_number(text: str) -> float:
    raise ValueError(f"a number of JSON must be finite, got {text}")


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest to a manifest, so that a changed number does not silently start another training."""
    unsigned = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(unsigned, sort_keys=True, ensure_ascii=True)
    return {**unsigned, "digest": hashlib.sha256(text.encode()).hexdigest()}


def source_to_json(source: Source) -> dict[str, str | None]:
    """Return a source as a manifest holds it, with absolute paths: a resume may start in another folder."""
    return {
        name: None if value is None else str(value.absolute() if isinstance(value, Path) else value)
        for name, value in asdict(source).items()
    }


def source_from_json(kept: Mapping[str, str | None], given: Source | None) -> Source:
    """Return the source in a manifest, with the paths that are given now.

    Raises:
        UserError: an option given now differs from the one in the manifest.
    """
    found: dict[str, Any] = {
        name: Path(value) if value and name in _PATH_FIELDS else value for name, value in kept.items()
    }
    found["min_count"] = None if found.get("min_count") is None else int(found["min_count"])
    for name, value in () if given is None else asdict(given).items():
        if value is not None and name not in _PATH_FIELDS and value != found.get(name):
            raise UserError(
                f"`--{name.replace('_', '-')}` must be left out, or what it was when the training began, got {value}"
            )
        if value is not None:
            found[name] = value
    return Source(**found)


def fingerprints(source: Source) -> dict[str, str]:
    """Return a digest of each file or folder: sizes, and the bytes at both ends of each file."""
    return {name: _digest(name, path) for name in _PATH_FIELDS if (path := getattr(source, name)) is not None}


def _digest(name: str, path: Path) -> str:
    digest = hashlib.sha256()
    try:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if not file.is_file() and file.exists():
                # Opening a pipe would wait for a writer.
                raise ValueError("it is no file")
            digest.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size}\n".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_HASHED_BYTES))
                opened.seek(max(0, file.stat().st_size - _HASHED_BYTES))
                digest.update(opened.read(_HASHED_BYTES))
    except (OSError, ValueError) as error:
        # A path with a NUL byte raises ValueError too.
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"`{name.replace('_', '-')}` must be what the training began with, got {path}: {reason}"
        ) from None
    return digest.hexdigest()


def check_fingerprints(source: Source, kept: Mapping[str, str]) -> None:
    """Check that the files of a source are the ones that `fingerprints` saw.

    Raises:
        UserError: a file differs, or cannot be read.
    """
    found = fingerprints(source)
    for name in _PATH_FIELDS:
        if kept.get(name) != found.get(name):
            raise UserError(
                f"`{name.replace('_', '-')}` must be what the training began with, got {getattr(source, name)}, "
                "which differs"
            )
