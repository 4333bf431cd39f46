"""Save and load one safetensors file: the `safetensors` library reads and writes it, the digest is added here."""

import contextlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError, TensorSpec
from torch import Tensor

from manyclass import _check
from manyclass.errors import UserError
from manyclass.storage._digest import (
    CHUNK_BYTES,
    NO_DIGEST,
    RefusedError,
    compare,
    read_header,
    started_digest,
    write_digest,
)
from manyclass.storage._tree import DTYPES, Packing, unique_keys, unpack
from manyclass.storage.atomic import atomic_write

_FORMAT = 2
_MAX_REASON_CHARACTERS = 300  # a file may have names of any length
_TREE = "content.json"  # the tensor that holds the tree, since headers must stay small
_METADATA = "manyclass"  # a single key, since the library writes several in random order
_ERROR_NUMBER = re.compile(r"os error (\d+)")


def save(
    path: Path,
    content: Mapping[str, object],
    *,
    content_type: str,
    keep: Path | None = None,
    follow_links: bool = True,
) -> None:
    """Save plain data and tensors as one safetensors file, replaced by atomic rename.

    Args:
        path: the file, in an existing folder.
        content: a tree of dicts (with keys of str or int), lists, tuples, None, bool, int, float, str and dense
            tensors. It is loaded equal and with equal types, but subclasses become their base: an OrderedDict a dict, a
            Parameter a Tensor. Tensors that are on another device or not contiguous are first copied to the CPU, all
            of them. A tensor that occurs several times is saved once.
        content_type: a word for the content; `load` requires the same.
        keep: new name of the file replaced, in the same folder. None: it is deleted.
        follow_links: whether a symbolic link at `path` leads to the file to replace; if not, the link is replaced.

    Raises:
        TypeError: `content` holds a value or a key of another type.
        ValueError: `content` is nested too deeply, has too many tensors, or lists and dicts that are too long: save
            long ones as tensors, strings by `pack_strings`.
        UserError: the disk is full, or the file cannot be written. Nothing was overwritten.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "counts.safetensors"
        >>> save(path, {"counts": torch.tensor([3, 1]), "names": ("the", "of")}, content_type="counts")
        >>> load(path, content_type="counts")
        {'counts': tensor([3, 1]), 'names': ('the', 'of')}
    """
    from manyclass import __version__

    tensors = _packed(content)
    about = {"format": _FORMAT, "content_type": content_type, "version": __version__}
    with atomic_write(path, keep=keep, follow_links=follow_links) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.serialize_file(_specs(tensors), temporary, _metadata(about))
        except SafetensorError as error:
            # The library hides the number of the system's error in its message.
            number = _ERROR_NUMBER.search(str(error))
            raise OSError(*((int(number[1]), os.strerror(int(number[1]))) if number else (str(error),))) from None
        # The library makes a file that only its owner may read.
        temporary.chmod(mode)
        with temporary.open("r+b") as file:
            write_digest(file, len(tensors))


def write_json(path: Path, content: object) -> None:
    """Write a JSON file for people to read, replaced by atomic rename.

    Raises:
        UserError: the disk is full, or the file cannot be written. Nothing was overwritten.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def to_tensor(content: Mapping[str, object]) -> Tensor:
    """Serialize plain data and tensors to bytes, uint8, for a state dict; `content` as for `save`.

    Example:
        >>> from_tensor(to_tensor({"steps": 3, "table": torch.ones(2)}))
        {'steps': 3, 'table': tensor([1., 1.])}
    """
    tensors = _packed(content)
    file = io.BytesIO(safetensors.serialize(_specs(tensors), _metadata({})))
    write_digest(file, len(tensors))
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def from_tensor(tensor: Tensor) -> dict[str, Any]:
    """Return the content given to `to_tensor`, with tensors on the CPU.

    Raises:
        TypeError: the argument is not a tensor.
        ValueError: the bytes are not from `to_tensor`, or damaged.
    """
    if _check.tensor("tensor", tensor).dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"`tensor` must be bytes [N] of uint8, got {list(tensor.shape)} of {tensor.dtype}")
    data = tensor.cpu().numpy().tobytes()
    try:
        header = read_header(io.BytesIO(data), len(data))
        digest = started_digest(header)
        digest.update(data[len(header) :])
        compare(digest, header)
        return _unpacked(safetensors.torch.load(data))
    except (RefusedError, SafetensorError) as reason:
        raise ValueError(f"`tensor` must come from `to_tensor`: {reason}") from None


def load(path: Path, *, content_type: str) -> dict[str, Any]:
    """Load saved content, with tensors on the CPU that own their memory. No file can make this run code.

    Args:
        path: the file.
        content_type: the one the file must have.

    Raises:
        UserError: there is no such file; it is damaged, has another content type or another format, or is not of
            manyclass; memory does not suffice.
    """
    with _opened(path, content_type) as file:
        file.outline()
        digest = started_digest(file.header)
        tensors = {}
        # In the order of the file, where the library has found no gaps: the digest covers every byte.
        for name in file.tensors.offset_keys():
            tensors[name] = file.read(name)
            digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
        compare(digest, file.header)
        return _unpacked(tensors)


def outline(path: Path, *, content_type: str) -> dict[str, Any]:
    """Load saved content with tensors on the "meta" device, which have shape and dtype but are not read.

    Raises:
        UserError: as `load`, but damage in a tensor is not seen.
    """
    with _opened(path, content_type) as file:
        return _unpacked({**file.outline(), _TREE: file.read(_TREE)})


def check(path: Path, *, content_type: str) -> None:
    """Read a file to its end in bounded memory.

    Raises:
        UserError: as `load`.
    """
    with _opened(path, content_type) as file:
        digest = started_digest(file.header)
        while chunk := file.raw.read(CHUNK_BYTES):
            digest.update(chunk)
        compare(digest, file.header)
        _unpacked({**file.outline(), _TREE: file.read(_TREE)})


@dataclass(frozen=True)
class _File:
    """An open file.

    Args:
        header: its bytes up to the first tensor.
        raw: the file, at its first tensor.
        tensors: the file, opened by the library.
    """

    header: bytes
    raw: BinaryIO
    tensors: Any

    def outline(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device, and so check their shapes and dtypes before memory is taken."""
        found = {}
        for name in self.tensors.offset_keys():
            entry = self.tensors.get_slice(name)
            if entry.get_dtype() not in DTYPES:
                raise RefusedError(f"its tensor {name!r} has the dtype {entry.get_dtype()}, which is not supported")
            try:
                found[name] = torch.empty(entry.get_shape(), dtype=DTYPES[entry.get_dtype()], device="meta")
            except (RuntimeError, OverflowError, TypeError):
                # Torch has no length of 2⁶³ or more, and calls one a TypeError.
                raise RefusedError(f"it is damaged: its tensor {name!r} has an impossible shape") from None
        if _TREE not in found or found[_TREE].dtype != torch.uint8:
            raise RefusedError("it is damaged: it has no JSON")
        return found

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self.tensors.get_tensor(name)
        except (RuntimeError, MemoryError):
            raise RefusedError(f"its tensor {name!r} needs more memory than there is") from None
        return tensor


@contextlib.contextmanager
def _opened(path: Path, content_type: str) -> Iterator[_File]:
    """Open a file of this content type, and turn every fault into a UserError."""
    try:
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise RefusedError("it is no file")
        # Tensors are read, not memory-mapped: they own their memory, and a file cut off while it is read is an error,
        # whereas a memory map would end the process. The library maps the file only to read the header again.
        with path.open("rb") as raw:
            header = read_header(raw, os.fstat(raw.fileno()).st_size)
            with safetensors.safe_open(path, "pt", backend="pread") as tensors:
                _check_header(header)
                _accept(tensors.metadata() or {}, content_type)
                if not os.path.samestat(os.fstat(raw.fileno()), path.stat()):
                    raise RefusedError("it was replaced while it was opened: read it again")
                yield _File(header, raw, tensors)
    except FileNotFoundError:
        raise UserError(f"cannot read {path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except MemoryError:
        raise UserError(f"cannot read {path}: it needs more memory than there is") from None
    except SafetensorError as error:
        text = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise UserError(f"cannot read {path}: it is cut off or damaged: {text[:_MAX_REASON_CHARACTERS]}") from None
    except RefusedError as reason:
        raise UserError(f"cannot read {path}: {str(reason)[:_MAX_REASON_CHARACTERS]}") from None


def _check_header(header: bytes) -> None:
    """Refuse a name that occurs twice, of which the library would take the last."""
    try:
        # Only the keys are checked, so the objects are not kept.
        json.loads(header[8:], object_pairs_hook=lambda pairs: unique_keys(pairs) and None)
    except ValueError as error:
        raise RefusedError(f"it is damaged: {error}") from None


def _accept(metadata: Mapping[str, str], content_type: str) -> None:
    if "manyclass_format" in metadata:
        raise RefusedError("it was written by an earlier version of manyclass; train it again")
    if _METADATA not in metadata:
        raise RefusedError("it is a safetensors file, but not one of manyclass")
    try:
        about = json.loads(metadata[_METADATA])
        version, found = about["format"], about["content_type"]
    except (ValueError, RecursionError, KeyError, TypeError):
        version = found = None
    if type(version) is not int:
        raise RefusedError("it is damaged: its metadata has no format number")
    if version > _FORMAT:
        raise RefusedError(
            f"it was written by a newer version, format {version}; this one reads format {_FORMAT}: upgrade manyclass"
        )
    if version < _FORMAT:
        raise RefusedError("it was written by an earlier version of manyclass; train it again")
    if found != content_type:
        raise RefusedError(f"its content type is {found!r}, not {content_type!r}")


def _metadata(about: Mapping[str, object]) -> dict[str, str]:
    return {_METADATA: json.dumps({**about, "digest": NO_DIGEST}, separators=(",", ":"))}


def _packed(content: Mapping[str, object]) -> dict[str, Tensor]:
    """Turn content into named tensors, contiguous and on the CPU; one of them is the tree that names the others."""
    packing = Packing({_TREE, "__metadata__"})
    tree = torch.frombuffer(bytearray(packing.json(content)), dtype=torch.uint8)
    tensors = {**packing.tensors, _TREE: tree}
    return {name: tensor.detach().resolve_conj().resolve_neg().cpu().contiguous() for name, tensor in tensors.items()}


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Describe tensors for the library, which reads them by address: they must outlive the call."""
    return {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }


def _unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Build the tree, with these tensors for the names in it."""
    if _TREE not in tensors:
        raise RefusedError("it is damaged: it has no JSON")
    named = {name: tensor for name, tensor in tensors.items() if name != _TREE}
    try:
        return unpack(tensors[_TREE].numpy().tobytes(), named.__getitem__)
    except ValueError as error:
        raise RefusedError(f"it is damaged: {error}") from None
