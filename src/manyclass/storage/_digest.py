"""The digest of a safetensors file: SHA-256 of the file with zeros for the 64 digits of the digest in its header."""

import hashlib
import re
from typing import BinaryIO

NO_DIGEST = "0" * 64  # the header has it until the file is complete
CHUNK_BYTES = 1 << 22
# Each tensor takes time and memory whatever its size, so that a small file of many would take minutes.
_MAX_TENSORS = 20_000
_MAX_HEADER_BYTES = 1 << 25
_DIGEST = re.compile(rb'\\"digest\\":\\"([0-9a-f]{64})\\"')


class RefusedError(Exception):
    """Refusal to read a file; its message is the second half of a sentence."""


def read_header(file: BinaryIO, size: int) -> bytes:
    """Read the bytes of a file of this size up to its first tensor.

    Raises:
        RefusedError: the header is cut off or names too many tensors, or the file has another format.
    """
    start = file.read(9)
    if not start:
        raise RefusedError("it is empty")
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8:
        raise RefusedError(f"it is cut off: {size} bytes are no safetensors file")
    if length > _MAX_HEADER_BYTES or start[8:] not in (b"{", b""):
        raise RefusedError(f"it is no safetensors file{_other_format(start)}")
    header = start + file.read(length - 1)
    if len(header) < 8 + length:
        raise RefusedError(f"it is cut off: {size} bytes end within its header")
    # Quotes within a name are escaped, so this counts the tensors before anything is parsed.
    if (number := header.count(b'"data_offsets"')) > _MAX_TENSORS:
        raise RefusedError(f"it names {number:,} tensors, which are more than {_MAX_TENSORS:,}")
    return header


def _other_format(start: bytes) -> str:
    if start.startswith(b"PK"):
        return " but a zip, as torch.save writes it: loading one could run code"
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return " but a pickle: loading one could run code"
    return ""


def write_digest(file: BinaryIO, num_tensors: int) -> None:
    """Replace the zeros in the header of a complete file by the digest of the file."""
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES or num_tensors > _MAX_TENSORS:
        raise ValueError(f"`content` must have fewer tensors, got {num_tensors}, more than a header may hold")
    file.seek(0)
    header = file.read(8 + length)
    digest = started_digest(header)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.seek(_digest_span(header)[0])
    file.write(digest.hexdigest().encode())


def _digest_span(header: bytes) -> tuple[int, int]:
    found = _DIGEST.search(header)
    if found is None:
        raise RefusedError("it is damaged: its header has no digest")
    return found.span(1)


def started_digest(header: bytes) -> "hashlib._Hash":
    """Start the digest of a file with its header."""
    begin, end = _digest_span(header)
    return hashlib.sha256(header[:begin] + NO_DIGEST.encode() + header[end:])


def compare(digest: "hashlib._Hash", header: bytes) -> None:
    begin, end = _digest_span(header)
    if header[begin:end] != digest.hexdigest().encode():
        raise RefusedError("it is damaged: its digest is another than when it was written")
