"""Arrays in NumPy's files, read a few rows at a time, and never as pickles.

NumPy memory-maps a .npy file. A member of a .npz archive is read here as a stream, since `numpy.load` and
`scipy.sparse.load_npz` hold it in memory as a whole.
"""

import lzma
import math
import mmap
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
from numpy.lib import format as npy

from manyclass.data.files import one_line
from manyclass.errors import UserError

Array = np.ndarray[Any, Any]

_READ_BYTES = 1 << 24
_MAX_LENGTH = 2**63 - 1  # of a dimension
# Raised by a broken archive, or by an unknown compression.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    NotImplementedError,
    MemoryError,
)


class ArrayFile:
    """An array in a .npy file, which is memory-mapped, or in a .npz archive, which is read from its start.

    Args:
        where: a description of the array, for errors.
        source: a .npy file, or a member of an archive at its start.
        size: bytes of the array with its header.
        name: the user's name for the file, for errors.

    Raises:
        UserError: it holds no array, or one of Python objects, or another number of bytes than its header says.
    """

    def __init__(self, where: str, source: Path | IO[bytes], size: int, *, name: str) -> None:
        self._where, self._source, self._name = where, source, name
        self._next = 0
        self._held: Array | None = None
        by_columns = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if isinstance(source, Path):
                    with source.open("rb") as file:
                        self.shape, _, self.dtype, begin = _header(file)
                else:
                    self.shape, by_columns, self.dtype, begin = _header(source)
            except Exception as error:  # A header is a Python literal, so anything may be wrong with it.
                self._fail(one_line(error)[:200] or type(error).__name__)
        if self.dtype.hasobject:
            self._fail("it holds Python objects, which are not loaded")
        possible = all(type(length) is int and 0 <= length <= _MAX_LENGTH for length in self.shape)
        if not possible or not self.dtype.itemsize:
            self._fail(f"shape {self.shape} of {self.dtype} is impossible")
        needed = begin + math.prod(self.shape) * self.dtype.itemsize
        if needed != size:
            self._fail(f"shape {self.shape} of {self.dtype} needs {needed:,} bytes, got {size:,}")
        if isinstance(source, Path):
            # As np.load(mmap_mode="r"), but a pickle or an archive with this ending is an error. Only now: NumPy's own
            # product of the lengths may overflow.
            try:
                self._held = npy.open_memmap(source, "r")
            except Exception as error:
                self._fail(one_line(error)[:200] or type(error).__name__)
        if by_columns and len(self.shape) > 1:
            # An array stored column by column cannot be read row by row.
            self._held = np.frombuffer(self._bytes(size - begin), self.dtype).reshape(self.shape, order="F")

    def __len__(self) -> int:
        return int(self.shape[0]) if self.shape else 0

    def read(self, number: int) -> Array:
        """Return the next `number` rows, or all that are left if they are fewer."""
        number = min(number, len(self) - self._next)
        begin, self._next = self._next, self._next + number
        if self._held is not None:
            return self._held[begin : self._next]
        shape = (number, *self.shape[1:])
        return np.frombuffer(self._bytes(math.prod(shape) * self.dtype.itemsize), self.dtype).reshape(shape)

    def whole(self) -> Array:
        """Return the whole array of an archive, which may have no dimension."""
        if self.shape:
            return self.read(len(self))
        return np.frombuffer(self._bytes(self.dtype.itemsize), self.dtype).reshape(())

    def free_pages(self) -> None:
        """Free the memory of the rows read so far."""
        if isinstance(self._held, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped = self._held._mmap  # type: ignore[attr-defined]
            mapped.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, number: int) -> bytes:
        assert not isinstance(self._source, Path)
        parts, left = [], number
        try:
            while left and (part := self._source.read(min(left, _READ_BYTES))):
                parts.append(part)
                left -= len(part)
        except _BROKEN as error:
            self._fail(one_line(error) or type(error).__name__)
        if left:
            self._fail("it ends too early")
        return b"".join(parts)

    def _fail(self, reason: str) -> NoReturn:
        raise UserError(f"`{self._name}` must hold an array that can be read, got {self._where}: {reason}")


def open_archive(path: Path, file: IO[bytes], name: str) -> zipfile.ZipFile:
    """Open a .npz archive.

    Raises:
        UserError: the file is not an archive.
    """
    try:
        return zipfile.ZipFile(file)
    except _BROKEN as error:
        raise UserError(f"`{name}` must be a .npz archive, got {path}: {one_line(error)}") from None


def open_member(archive: zipfile.ZipFile, key: str, path: Path, name: str) -> ArrayFile:
    """Open an array of a .npz archive."""
    where = f"{key} of {path}"
    try:
        info = archive.getinfo(f"{key}.npy")
        file = archive.open(info)
    except (*_BROKEN, KeyError, RuntimeError) as error:
        raise UserError(f"`{name}` must hold an array that can be read, got {where}: {one_line(error)}") from None
    return ArrayFile(where, file, info.file_size, name=name)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, "np.dtype[Any]", int]:
    """Return the shape, True if stored column by column, the dtype, and the position of the numbers."""
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {'.'.join(map(str, version))} of the format is not known")
    return *read(file), file.tell()
