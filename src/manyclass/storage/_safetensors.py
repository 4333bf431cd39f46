"""The safetensors format: the length of a header, the header as JSON, then the bytes of tensors, one after another.

It is written and read here, not by the library, for the sake of the digest: the bytes are hashed as they pass, once,
from and into the memory that they stay in. Its place in the header is filled in at the end, and counts as zeros.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any, BinaryIO

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_AT_ONCE = 1 << 22
_BEFORE_DIGEST = b'{"__metadata__":{"digest":"'
_NO_DIGEST = "0" * 64


class RefusedError(Exception):
    """Why a file cannot be read, as the end of a sentence."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What stands before the tensors of a file.

    Args:
        data: the bytes, from the first of the file.
        metadata: str to str.
        fields: of tensors, as they were read.
    """

    data: bytes
    metadata: dict[str, str]
    fields: dict[str, Any]


def has_dtype(dtype: torch.dtype) -> bool:
    return dtype in _NAMES


def write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata, and a digest of all of it.

    Raises:
        ValueError: there are too many tensors for a header.
    """
    # By size of their elements, as the library does it, so that each begins at a multiple of that.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    fields: dict[str, object] = {"__metadata__": {"digest": _NO_DIGEST, **metadata}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        fields[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise ValueError(f"`content` must have fewer tensors, got {len(tensors)}, which no safetensors header holds")
    header = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(header)
    file.write(header)
    for tensor in tensors.values():
        there = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        for piece in _pieces(there):
            digest.update(piece)
            file.write(piece)
    file.seek(8 + len(_BEFORE_DIGEST))
    file.write(digest.hexdigest().encode())


def read_header(file: BufferedIOBase, size: int) -> Header:
    """The header of a file of that many bytes.

    Raises:
        RefusedError: it is none, or it is cut off or damaged.
    """
    start = file.read(9)
    if not start:
        raise RefusedError("it is empty")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8:
        raise RefusedError(f"it is cut off: {size} bytes are no safetensors file")
    if length > _LONGEST_HEADER or start[8:] not in (b"{", b""):
        raise RefusedError(f"it is no safetensors file{_instead(start)}")
    data = start + file.read(length - 1)
    if len(data) < 8 + length:
        raise RefusedError(f"it is cut off: {size} bytes end within its header")
    try:
        fields = json.loads(data[8:])
    except (ValueError, RecursionError):
        raise RefusedError("it is damaged: its header is no JSON") from None
    metadata = fields.pop("__metadata__", {}) if isinstance(fields, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RefusedError("it is damaged: its header is not that of a safetensors file")
    return Header(data, metadata, fields)


def entries(header: Header, size: int) -> dict[str, Entry]:
    """The tensors of a file of that many bytes, in the order they lie in.

    Raises:
        RefusedError: they are not what they should be, or not all there.
    """
    found, end = {}, len(header.data)
    for name, field in header.fields.items():
        match field:
            case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [int(), int()] as offsets}:
                whole = all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, *offsets))
            case _:
                whole = False
        if not whole or dtype not in _DTYPES:
            raise RefusedError(f"it is damaged: its tensor {name!r} is not described as one")
        entry = Entry(_DTYPES[dtype], tuple(shape), len(header.data) + offsets[0])
        if entry.begin != end or offsets[1] - offsets[0] != entry.size:
            raise RefusedError(f"it is damaged: its tensor {name!r} does not lie where it should")
        found[name], end = entry, end + entry.size
    if end > size:
        raise RefusedError(f"it is cut off: {size:,} of {end:,} bytes are there")
    if end < size:
        raise RefusedError(f"it is damaged: {size - end:,} bytes follow its end")
    return found


def tensors(file: BufferedIOBase, header: Header, table: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """All tensors, read one after another; at the end it is seen whether they are what was written.

    Raises:
        RefusedError: memory does not suffice, or the file is damaged.
    """
    digest = _digest_of(header)
    file.seek(len(header.data))
    for name, entry in table.items():
        try:
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
        except (RuntimeError, MemoryError, OverflowError):
            raise RefusedError(
                f"its tensor {name!r} needs {entry.size:,} bytes of memory, more than there are"
            ) from None
        for piece in _pieces(tensor):
            if file.readinto(piece) < len(piece):
                raise RefusedError("it is cut off: it became shorter while it was read")
            digest.update(piece)
        yield name, tensor
    _compare(digest.hexdigest(), header)


def check(file: BufferedIOBase, header: Header) -> None:
    """See whether the file is what was written, with none of it kept.

    Raises:
        RefusedError: it is damaged.
    """
    digest = _digest_of(header)
    file.seek(len(header.data))
    while piece := file.read(_AT_ONCE):
        digest.update(piece)
    _compare(digest.hexdigest(), header)


def _digest_of(header: Header) -> "hashlib._Hash":
    before = 8 + len(_BEFORE_DIGEST)
    if header.data[8:before] != _BEFORE_DIGEST:
        raise RefusedError("it is damaged: its header has no digest where it should be")
    zeros = _NO_DIGEST.encode()
    return hashlib.sha256(header.data[:before] + zeros + header.data[before + len(zeros) :])


def _compare(digest: str, header: Header) -> None:
    if header.metadata.get("digest") != digest:
        raise RefusedError("it is damaged: its digest is another than when it was written")


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor on the CPU, where they are; few at once, so that caches hold them."""
    if tensor.numel():
        whole = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(whole), _AT_ONCE):
            yield whole[begin : begin + _AT_ONCE]


def _instead(start: bytes) -> str:
    if start.startswith(b"PK"):
        return " but a zip, as torch.save writes it: loading one could run code"
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return " but a pickle: loading one could run code"
    return ""
