"""Saving and loading one file."""

import contextlib
import io
import json
import stat
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from manyclass.errors import UserError
from manyclass.storage import _safetensors
from manyclass.storage._beside import replacing
from manyclass.storage._safetensors import Entry, Header, RefusedError
from manyclass.storage._tree import Packing, unpack

_FORMAT = 1
_TREE = "content.json"


def save(path: Path, content: Mapping[str, object], *, kind: str, keep: Path | None = None) -> None:
    """Save plain data and tensors as one safetensors file, as a whole or not at all.

    It is written beside, synced and renamed, so `path` is at every moment the old file or the new one.

    Args:
        path: the file; its folder exists.
        content: a tree of dicts (with keys of str or int), lists, tuples, None, bool, int, float, str and dense
            tensors. It comes back equal, and types too, except that what derives from one of these comes back as that:
            an OrderedDict as a dict, a Parameter as a Tensor. Tensors of any device are saved from the CPU, a tensor
            that is in several places once.
        kind: what it is, in a word; `load` asks for the same.
        keep: where to put the file that was there before, in the same folder. None: nowhere.

    Raises:
        TypeError: something in `content` is none of these.
        ValueError: `content` is nested too deeply, or has too many tensors.
        UserError: the disk is full, or the file cannot be written. Nothing was overwritten then.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "counts.safetensors"
        >>> save(path, {"counts": torch.tensor([3, 1]), "names": ("the", "of")}, kind="counts")
        >>> load(path, kind="counts")
        {'counts': tensor([3, 1]), 'names': ('the', 'of')}
    """
    from manyclass import __version__

    packing = Packing(_TREE)
    tree = packing.json(content)
    # Last: tensors of larger elements come first, and among equals it is last here. Headers must be small, a tree not.
    tensors = {**packing.tensors, _TREE: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}
    metadata = {"manyclass_format": str(_FORMAT), "manyclass_version": __version__, "kind": kind}
    with replacing(path, keep=keep) as file:
        _safetensors.write(file, tensors, metadata)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file for people to read, as a whole or not at all.

    Raises:
        UserError: the disk is full, or the file cannot be written. Nothing was overwritten then.
    """
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def to_tensor(content: Mapping[str, object]) -> torch.Tensor:
    """Plain data and tensors as bytes, uint8, for where only a tensor can be kept; `content` as of `save`.

    Example:
        >>> from_tensor(to_tensor({"steps": 3, "table": torch.ones(2)}))
        {'steps': 3, 'table': tensor([1., 1.])}
    """
    packing = Packing(_TREE)
    tree = packing.json(content)
    file = io.BytesIO()
    tensors = {**packing.tensors, _TREE: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}
    _safetensors.write(file, tensors, {})
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def from_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """What `to_tensor` was given, with tensors on the CPU.

    Raises:
        ValueError: it is something else, or damaged.
    """
    file = io.BytesIO(tensor.cpu().numpy().tobytes())
    try:
        header = _safetensors.read_header(file, len(tensor))
        tensors = dict(_safetensors.tensors(file, header, _safetensors.entries(header, len(tensor))))
        if _TREE not in tensors:
            raise RefusedError("it is damaged: it has no JSON")
        return _unpacked(tensors[_TREE].numpy().tobytes(), tensors)
    except RefusedError as reason:
        raise ValueError(f"`tensor` must be what `to_tensor` gave: {reason}") from None


def load(path: Path, *, kind: str) -> dict[str, Any]:
    """What was saved, with tensors on the CPU. Loading runs no code, whatever the file is.

    Args:
        path: the file.
        kind: what it must be.

    Raises:
        UserError: there is no such file; it is damaged, of another kind, of another program or of a newer version.
    """
    with _opened(path, kind) as (file, header, table):
        tensors = dict(_safetensors.tensors(file, header, table))
        tree = tensors[_TREE].numpy().tobytes()
        return _unpacked(tree, tensors)


def about(path: Path, *, kind: str) -> dict[str, Any]:
    """What was saved, with tensors on torch's "meta" device: they have a shape and a dtype, and were not read.

    Raises:
        UserError: as `load`, except that damage in a tensor is not seen.
    """
    with _opened(path, kind) as (file, _, table):
        return _outline(file, table)


def check(path: Path, *, kind: str) -> None:
    """Read a file to the end and keep nothing of it.

    Raises:
        UserError: as `load`.
    """
    with _opened(path, kind) as (file, header, table):
        _safetensors.check(file, header)
        _outline(file, table)


@contextlib.contextmanager
def _opened(path: Path, kind: str) -> Iterator[tuple[BufferedReader, Header, dict[str, Entry]]]:
    """An open file whose header is as it should be; turns what is wrong with it into a message."""
    try:
        with path.open("rb") if _is_file(path) else contextlib.nullcontext() as file:
            if file is None:
                raise RefusedError("it is no file")
            size = file.seek(0, 2)
            file.seek(0)
            header = _safetensors.read_header(file, size)
            _accept(header.metadata, kind)
            table = _safetensors.entries(header, size)
            tree = table.get(_TREE)
            if tree is None or tree.dtype != torch.uint8:
                raise RefusedError("it is damaged: it has no JSON")
            yield file, header, table
    except FileNotFoundError:
        raise UserError(f"cannot read {path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except RefusedError as reason:
        raise UserError(f"cannot read {path}: {reason}") from None


def _is_file(path: Path) -> bool:
    # Opening a pipe would wait for a writer.
    return stat.S_ISREG(path.stat().st_mode)


def _accept(metadata: Mapping[str, str], kind: str) -> None:
    version = metadata.get("manyclass_format")
    if version is None:
        raise RefusedError("it is a safetensors file, but not one of manyclass")
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise RefusedError("it is damaged: its format has no number")
    if int(version) > _FORMAT:
        raise RefusedError(
            f"it was written by a newer version, format {int(version)}; this one reads up to {_FORMAT}: "
            "upgrade manyclass"
        )
    if (found := metadata.get("kind")) != kind:
        raise RefusedError(f"it is of the kind {found!r}, not {kind!r}")


def _outline(file: BufferedReader, table: Mapping[str, Entry]) -> dict[str, Any]:
    file.seek(table[_TREE].begin)
    tree = file.read(table[_TREE].size)
    try:
        empty = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in table.items()
            if name != _TREE
        }
    except (RuntimeError, OverflowError):
        raise RefusedError("it is damaged: it has a tensor of an impossible shape") from None
    return _unpacked(tree, empty)


def _unpacked(tree: bytes, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    try:
        return unpack(tree, tensors.__getitem__)
    except ValueError as error:
        raise RefusedError(f"it is damaged: {error}") from None
