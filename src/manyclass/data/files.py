"""Text files, compressed or not, in pieces of bounded size."""

import bz2
import errno
import gzip
import io
import lzma
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from manyclass.errors import UserError

Watch = Callable[[int, int], None]  # told how many bytes of a file are read, and of how many

STANDARD_INPUT = Path("-")
PACKED = (".gz", ".xz", ".bz2")
LINE_LIMIT = 64 << 20  # bytes: a file without line ends must not fill the memory
_SIZE = 1 << 20
_SHOWN = 60
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BOM = b"\xef\xbb\xbf"
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class Block:
    """Whole lines of a text file.

    Args:
        data: UTF-8; each line ends in a line feed, whatever it ended in before.
        first: the number of its first line, from 1.
        done: bytes of the file read so far, as they lie on the disk.
    """

    data: bytes
    first: int
    done: int


def lines(path: Path, *, name: str = "data", watch: Watch | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends; .gz, .xz and .bz2 are read as what they hold.

    Args:
        path: the file. Its lines end in a line feed, a carriage return or both, one so and the next so.
        name: what the user knows it as, for errors.
        watch: told how far it is.

    Raises:
        UserError: it cannot be read, holds something else than UTF-8, or a NUL byte, or a line above 64 MiB.
    """
    for block in blocks(path, name=name):
        yield from block.data.decode().split("\n")[:-1]
        if watch is not None:
            watch(block.done, path.stat().st_size)


def line_batches(path: Path, size: int, *, name: str = "data") -> Iterator[list[tuple[int, str]]]:
    """The lines of a UTF-8 file and their numbers, from 1, at most so many at a time; see `lines`.

    It is read once, so it may be the standard input, `-`: lines that have come do not wait for others.
    """
    pieces = _of_standard_input() if path == STANDARD_INPUT else _of_file(path, name)
    for block in _checked(pieces, path, name):
        numbered = list(enumerate(block.data.decode().split("\n")[:-1], block.first))
        for first in range(0, len(numbered), size):
            yield numbered[first : first + size]


def blocks(path: Path, *, name: str = "data") -> Iterator[Block]:
    """The lines of a UTF-8 file, about a mebibyte of them at a time; see `lines`."""
    yield from _checked(_of_file(path, name), path, name)


def _checked(pieces: Iterator[tuple[bytes, int]], path: Path, name: str) -> Iterator[Block]:
    for block in _whole_lines(pieces, path, name):
        try:
            if not block.data.isascii():
                block.data.decode()
        except UnicodeDecodeError as error:
            number = block.first + block.data.count(b"\n", 0, error.start)
            byte = block.data[error.start]
            raise UserError(f"`{name}` must be UTF-8, got byte 0x{byte:02x} in line {number} of {path}") from None
        if b"\0" in block.data:
            number = block.first + block.data.count(b"\n", 0, block.data.index(b"\0"))
            raise UserError(f"`{name}` must be text, got a NUL byte in line {number} of {path}")
        yield block


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turns what goes wrong while a file is read into what its owner can mend.

    Raises:
        UserError: it is a folder or a pipe, may not be read, or holds something else than its ending says.
    """
    try:
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            raise UserError(f"`{name}` must be a file, got the folder {path}")
        if not stat.S_ISREG(mode):
            raise UserError(f"`{name}` must be a file on a disk, it may be read twice, got {path}")
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"`{name}` must be a file that can be read, got {path}: {one_line(reason)}") from None
    except MemoryError:
        raise UserError(f"`{name}` must be a file that can be read, got {path}: it asks for too much memory") from None


def beginning(folder: Path, stem: str, *, name: str = "data") -> Path | None:
    """The first file in a folder whose name is the stem, with any endings; None: there is none.

    Raises:
        UserError: the folder may not be looked into.
    """
    try:
        return next((path for path in sorted(folder.iterdir()) if path.name.split(".")[0] == stem), None)
    except OSError as error:
        raise UserError(f"`{name}` must be a folder that can be read, got {folder}: {error.strerror}") from None


@contextmanager
def writing(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Makes a folder and leaves all files of these names in it, or none of them.

    Raises:
        UserError: its disk is full, or it may not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder, names)
        yield
    except BaseException as error:
        _remove(folder, names)
        if not isinstance(error, OSError):
            raise
        if error.errno in _FULL:
            raise UserError(f"The disk of {folder} is full: free some of it, or choose another folder") from None
        reason = error.strerror or str(error)
        raise UserError(f"`folder` must be one that can be written to, got {folder}: {reason}") from None


def shown(text: str) -> str:
    """What a file holds, for an error: quoted, on one line, cut if it is long.

    Example:
        >>> shown("a\\tb"), len(shown("a" * 1000))
        ("'a\\\\tb'", 63)
    """
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def one_line(reason: Any) -> str:
    """A library's message without its line ends."""
    return " ".join(str(reason).split())


def kind(path: Path) -> str:
    """The ending of a file, in small letters, without that of its compression.

    Example:
        >>> kind(Path("train.CSV.gz")), kind(Path("a.npy")), kind(Path("a"))
        ('.csv', '.npy', '')
    """
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in PACKED:
        endings.pop()
    return endings[-1] if endings else ""


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError as error:  # a name that no file can have
        raise OSError(str(error)) from None


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def _of_file(path: Path, name: str) -> Iterator[tuple[bytes, int]]:
    """Pieces of what a file holds, the first of them no shorter than a byte order mark, and how far it is read."""
    with reading(path, name), path.open("rb") as raw, _unpacked(raw, path) as file:
        while piece := file.read(_SIZE):
            # A compressed file may yield less than was asked for.
            while len(piece) < len(_BOM) and (more := file.read(len(_BOM) - len(piece))):
                piece += more
            yield piece, raw.tell()


def _of_standard_input() -> Iterator[tuple[bytes, int]]:
    """The same of what has come by then."""
    file, done = cast("io.BufferedReader", sys.stdin.buffer), 0
    while piece := file.read1(_SIZE):
        if not done:
            while _BOM.startswith(piece) and len(piece) < len(_BOM) and (more := file.read1(len(_BOM) - len(piece))):
                piece += more
        done += len(piece)
        yield piece, done


def _whole_lines(pieces: Iterator[tuple[bytes, int]], path: Path, name: str) -> Iterator[Block]:
    first, done = 1, 0
    rest: list[bytes] = []  # of a line whose end is still to come
    held = b""  # a carriage return whose line feed may still come
    begun = False
    for piece, done in pieces:
        if not begun:
            piece, begun = piece.removeprefix(_BOM), True
        piece = held + piece
        held = b"\r" if piece.endswith(b"\r") else b""
        piece = _line_feeds(piece.removesuffix(b"\r"))
        end = piece.rfind(b"\n") + 1
        if end:
            data = b"".join([*rest, piece[:end]])
            rest = []
            yield Block(data, first, done)
            first += data.count(b"\n")
        rest.append(piece[end:])
        if sum(map(len, rest)) > LINE_LIMIT:
            limit = f"at most {LINE_LIMIT >> 20} MiB"
            raise UserError(f"`{name}` must have lines of {limit}, got a longer one, line {first} of {path}")
    last = b"".join(rest)
    if last or held:
        yield Block(last + b"\n", first, done)


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    opener = _OPENERS.get(path.suffix.lower())
    unpacked: IO[bytes] = raw if opener is None else opener(raw, "rb")
    return unpacked


def _line_feeds(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
