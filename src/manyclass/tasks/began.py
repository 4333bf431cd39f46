"""What a training began with, as its folder holds it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyclass.errors import UserError
from manyclass.tasks.kinds import KINDS
from manyclass.tasks.task import Source

FORMAT = 1
ABOUT = "fit.json"
PATHS = ("data", "held_out", "labels")
_EDGE = 1 << 20  # bytes at each end of a file that tell it from another


def read_about(folder: Path) -> dict[str, Any]:
    """What a training began with.

    Raises:
        UserError: the folder holds none, or a damaged or newer one.
    """
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"`MODEL` must be a folder that `manyclass fit` made, got {folder}: {error.strerror}") from None
    except (ValueError, RecursionError):
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
        or not all(value is None or (isinstance(value, str) and value) for value in source.values())
        or not str(source.get("min_count") or 1).isdecimal()
        or about.get("kind") not in list(KINDS)
        or not isinstance(about.get("files"), dict)
    ):
        raise UserError(f"cannot read {path}: it is damaged: it does not tell of a training")
    if signed(about) != about:
        raise UserError(f"cannot read {path}: it is damaged: its digest is another than when it was written")
    return about  # type: ignore[no-any-return]


def signed(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a training began with, and a digest of it: a number that was changed would make another training."""
    unsigned = {name: value for name, value in about.items() if name != "digest"}
    text = json.dumps(unsigned, sort_keys=True, ensure_ascii=True)
    return {**unsigned, "digest": hashlib.sha256(text.encode()).hexdigest()}


def source_kept(source: Source) -> dict[str, str | None]:
    """A source as a file holds it; who resumes may stand in another folder."""
    return {
        name: None if value is None else str(value.absolute() if isinstance(value, Path) else value)
        for name, value in asdict(source).items()
    }


def source_now(own: Mapping[str, str | None], given: Source | None) -> Source:
    """The source that a training had, in the places where its files are now.

    Raises:
        UserError: it is to be read in another way.
    """
    fields: dict[str, Any] = {name: Path(value) if value and name in PATHS else value for name, value in own.items()}
    fields["min_count"] = None if fields.get("min_count") is None else int(fields["min_count"])
    for name, value in () if given is None else asdict(given).items():
        if value is not None and name not in PATHS and value != fields.get(name):
            raise UserError(
                f"`--{name.replace('_', '-')}` must be left out, or what it was when the training began, got {value}"
            )
        if value is not None:
            fields[name] = value
    return Source(**fields)


def fingerprints(source: Source) -> dict[str, str]:
    """What tells the data from another: sizes and the bytes at both ends of each file."""
    return {name: _digest(name, path) for name in PATHS if (path := getattr(source, name)) is not None}


def _digest(name: str, path: Path) -> str:
    digest = hashlib.sha256()
    try:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in files:
            digest.update(f"{file.name if path.is_dir() else ''} {file.stat().st_size}\n".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_EDGE))
                opened.seek(max(0, file.stat().st_size - _EDGE))
                digest.update(opened.read(_EDGE))
    except (OSError, ValueError) as error:
        # A ValueError: a name that no file can have.
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"`{name.replace('_', '-')}` must be what the training began with, got {path}: {reason}"
        ) from None
    return digest.hexdigest()


def check_same(source: Source, was: Mapping[str, str]) -> None:
    """Raise where files are not those of which `fingerprints` gave what they were.

    Raises:
        UserError: one differs, or cannot be read.
    """
    found = fingerprints(source)
    for name in PATHS:
        if was.get(name) != found.get(name):
            raise UserError(
                f"`{name.replace('_', '-')}` must be what the training began with, got {getattr(source, name)}, "
                "which differs"
            )
