"""Text files, compressed or not, read in bounded memory."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from manyclass.errors import UserError

ReadProgress = Callable[[int, int], None]  # called with the bytes of a file read so far and in total

STANDARD_INPUT = Path("-")
COMPRESSED = (".gz", ".xz", ".bz2")
_MAX_LINE_BYTES = 64 << 20  # so that a file without line ends does not fill the memory
_READ_BYTES = 1 << 20
_SHOWN_CHARACTERS = 60
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BOM = b"\xef\xbb\xbf"
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of a text file.

    Args:
        data: UTF-8 in which each line ends in a line feed, whatever its end on disk.
        first: the number of its first line, from 1.
        done: bytes read so far, as on disk.
    """

    data: bytes
    first: int
    done: int


def lines(path: Path, *, name: str = "data", progress: ReadProgress | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their ends; .gz, .xz and .bz2 are decompressed.

    Args:
        path: the file. Each line ends in a line feed, a carriage return or both.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and the bytes in total.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has a NUL byte or a line above 64 MiB.
    """
    for block in blocks(path, name=name):
        yield from block.data.decode().split("\n")[:-1]
        if progress is not None:
            progress(block.done, path.stat().st_size)


def line_batches(path: Path, size: int, *, name: str = "data") -> Iterator[list[tuple[int, str]]]:
    """Yield the lines of a UTF-8 file and their numbers, from 1, at most `size` at a time; see `lines`.

    The file is read once, so it may be the standard input, `-`, whose lines are yielded as they arrive.
    """
    pieces = _of_standard_input() if path == STANDARD_INPUT else _of_file(path, name)
    for block in _checked(pieces, path, name):
        numbered = list(enumerate(block.data.decode().split("\n")[:-1], block.first))
        for first in range(0, len(numbered), size):
            yield numbered[first : first + size]


def blocks(path: Path, *, name: str = "data") -> Iterator[LineBlock]:
    """Yield the lines of a UTF-8 file, about a mebibyte at a time; see `lines`."""
    yield from _checked(_of_file(path, name), path, name)


def _checked(pieces: Iterator[tuple[bytes, int]], path: Path, name: str) -> Iterator[LineBlock]:
    """Yield the lines before the first that is not text, then raise UserError for it."""
    for block in _whole_lines(pieces, path, name):
        bad, fault = block.data.find(b"\0"), "text, got a NUL byte"
        try:
            if not block.data.isascii():
                block.data.decode()
        except UnicodeDecodeError as error:
            if bad < 0 or error.start < bad:
                bad, fault = error.start, f"UTF-8, got byte 0x{block.data[error.start]:02x}"
        if bad < 0:
            yield block
            continue
        good = block.data[: block.data.rfind(b"\n", 0, bad) + 1]
        if good:
            yield replace(block, data=good)
        number = block.first + good.count(b"\n")
        raise UserError(f"`{name}` must be {fault} in line {number} of {path}")


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turn errors while a file is read into a UserError that names the file.

    Raises:
        UserError: the file is a folder or a pipe, cannot be read, or is not compressed as its ending says.
    """
    try:
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            raise UserError(f"`{name}` must be a file, got the folder {path}")
        if not stat.S_ISREG(mode):
            raise UserError(f"`{name}` must be a file on a disk, since it is read twice, got {path}")
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"`{name}` must be a file that can be read, got {path}: {one_line(reason)}") from None
    except MemoryError:
        raise UserError(f"`{name}` must be a file that can be read, got {path}: it needs too much memory") from None


def find_by_stem(folder: Path, stem: str, *, name: str = "data") -> Path | None:
    """Return the first file in a folder with this stem and any endings, or None.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return next((path for path in sorted(folder.iterdir()) if path.name.split(".")[0] == stem), None)
    except OSError as error:
        raise UserError(f"`{name}` must be a folder that can be read, got {folder}: {error.strerror}") from None


def in_folder(folder: Path, stems: Sequence[str], *, name: str = "data") -> Path:
    """Return the file in a folder with the first of these stems that there is.

    Raises:
        UserError: there is none, or the folder cannot be read.
    """
    for stem in stems:
        if found := find_by_stem(folder, stem, name=name):
            return found
    wanted = " or ".join(f"{stem}.txt" for stem in stems)
    raise UserError(f"`{name}` must be a file, or a folder with {wanted}, got {folder}, which has none")


@contextmanager
def writing(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Make a folder to write files of these names to; on an error, remove all of them.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder, names)
        yield
    except BaseException as error:
        _remove(folder, names)
        if not isinstance(error, OSError):
            raise
        if error.errno in _DISK_FULL:
            raise UserError(f"The disk of {folder} is full: free some of it, or choose another folder") from None
        reason = error.strerror or str(error)
        raise UserError(f"`folder` must be one that can be written to, got {folder}: {reason}") from None


def shown(text: str) -> str:
    r"""Return text for an error: quoted, on one line, cut if it is long.

    Example:
        >>> shown("a\tb"), len(shown("a" * 1000))
        ("'a\\tb'", 63)
    """
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")


def one_line(reason: Any) -> str:
    """Return a library's message on one line."""
    return " ".join(str(reason).split())


def format_ending(path: Path) -> str:
    """Return the ending of a file in lower case, without that of its compression.

    Example:
        >>> format_ending(Path("train.CSV.gz")), format_ending(Path("a.npy")), format_ending(Path("a"))
        ('.csv', '.npy', '')
    """
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSED:
        endings.pop()
    return endings[-1] if endings else ""


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError as error:  # No file can have such a name.
        raise OSError(str(error)) from None


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def _of_file(path: Path, name: str) -> Iterator[tuple[bytes, int]]:
    """Yield parts of a file, and the bytes read so far."""
    with reading(path, name), path.open("rb") as raw, _decompressed(raw, path) as file:
        for piece in _pieces(file):
            yield piece, raw.tell()


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield parts of a file of `_READ_BYTES`; where it cannot be read on, first the part before that place."""
    ended = False
    while not ended:
        # The first part is at least as long as a byte order mark.
        parts, missing = list[bytes](), max(_READ_BYTES, len(_BOM))
        try:
            # Not `read`, which loses the part before an error in compressed data.
            while missing and (part := cast("io.BufferedReader", file).read1(missing)):
                parts.append(part)
                missing -= len(part)
        except (OSError, EOFError, lzma.LZMAError, zlib.error):
            if parts:
                yield b"".join(parts)
            raise
        ended = missing > 0
        if parts:
            yield b"".join(parts)


def _of_standard_input() -> Iterator[tuple[bytes, int]]:
    """Yield parts of the standard input as they arrive, and the bytes read so far."""
    file, done = cast("io.BufferedReader", sys.stdin.buffer), 0
    while piece := file.read1(_READ_BYTES):
        if not done:
            while _BOM.startswith(piece) and len(piece) < len(_BOM) and (more := file.read1(len(_BOM) - len(piece))):
                piece += more
        done += len(piece)
        yield piece, done


def _whole_lines(pieces: Iterator[tuple[bytes, int]], path: Path, name: str) -> Iterator[LineBlock]:
    first, done = 1, 0
    rest: list[bytes] = []  # parts of an unfinished line
    held = b""  # a carriage return whose line feed may follow
    started = False
    for piece, done in pieces:
        if not started:
            piece, started = piece.removeprefix(_BOM), True
        piece = held + piece
        held = b"\r" if piece.endswith(b"\r") else b""
        piece = _line_feeds(piece.removesuffix(b"\r"))
        end = piece.rfind(b"\n") + 1
        if end:
            data = b"".join([*rest, piece[:end]])
            rest = []
            yield LineBlock(data, first, done)
            first += data.count(b"\n")
        rest.append(piece[end:])
        if sum(map(len, rest)) > _MAX_LINE_BYTES:
            limit = f"at most {_MAX_LINE_BYTES >> 20} MiB"
            raise UserError(f"`{name}` must have lines of {limit}, got a longer one, line {first} of {path}")
    last = b"".join(rest)
    if last or held:
        yield LineBlock(last + b"\n", first, done)


def _decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    opener = _OPENERS.get(path.suffix.lower())
    opened: IO[bytes] = raw if opener is None else opener(raw, "rb")
    return opened


def _line_feeds(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
