"""Arrays of NumPy's files, read a few rows at a time, and never as pickles."""

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

# What a broken archive, or one of a kind that is not known, raises.
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
    """An array in a .npy file, which is memory-mapped, or in a .npz archive, which is read from its start on.

    Args:
        where: what it is, for errors.
        file: at the start of the array.
        size: of the array with its header, in bytes.
        path: of a .npy file. None: it is in an archive.
        name: what the user knows the file as, for errors.

    Raises:
        UserError: it holds no array, or one of Python objects, or fewer bytes than its header says.
    """

    def __init__(self, where: str, file: IO[bytes], size: int, *, path: Path | None, name: str) -> None:
        self._where, self._file, self._name = where, file, name
        self.shape, turned, self.dtype, header = self._header()
        if self.dtype.hasobject:
            self._fail("it holds Python objects, which are not loaded")
        if any(length < 0 for length in self.shape) or not self.dtype.itemsize:
            self._fail(f"shape {self.shape} of {self.dtype} cannot be")
        needed = header + math.prod(self.shape) * self.dtype.itemsize
        if needed != size:
            self._fail(f"shape {self.shape} of {self.dtype} needs {needed:,} bytes, got {size:,}")
        self._next = 0
        self._held: Array | None = None
        if path is not None and size > header:
            order = "F" if turned else "C"
            self._held = np.memmap(path, self.dtype, "r", header, self.shape, order)  # type: ignore[call-overload]
        elif turned and len(self.shape) > 1:
            # What is stored column by column cannot be read row by row.
            self._held = np.frombuffer(self._bytes(size - header), self.dtype).reshape(self.shape, order="F")

    def _header(self) -> tuple[tuple[int, ...], bool, "np.dtype[Any]", int]:
        """Shape, whether columns rather than rows lie together, type, and where the numbers begin."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                version = npy.read_magic(self._file)
                read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
                if read is None:
                    raise ValueError(f"version {'.'.join(map(str, version))} of the format is not known")
                return *read(self._file), self._file.tell()
            except Exception as error:  # a header is a piece of Python, so what is wrong with it may be anything
                self._fail(one_line(error)[:200] or type(error).__name__)

    def __len__(self) -> int:
        return int(self.shape[0]) if self.shape else 0

    def read(self, number: int) -> Array:
        """The next rows: `number` of them, or those that are left."""
        number = min(number, len(self) - self._next)
        begin, self._next = self._next, self._next + number
        if self._held is not None:
            return self._held[begin : self._next]
        shape = (number, *self.shape[1:])
        return np.frombuffer(self._bytes(math.prod(shape) * self.dtype.itemsize), self.dtype).reshape(shape)

    def whole(self) -> Array:
        """All of it; for arrays of no dimension too."""
        if self.shape:
            return self.read(len(self))
        return np.frombuffer(self._bytes(self.dtype.itemsize), self.dtype).reshape(())

    def drop(self) -> None:
        """Give the memory back that the rows read so far take."""
        if isinstance(self._held, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped = self._held._mmap  # type: ignore[attr-defined]
            mapped.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, number: int) -> bytes:
        parts, left = [], number
        try:
            while left and (part := self._file.read(min(left, 1 << 24))):
                parts.append(part)
                left -= len(part)
        except _BROKEN as error:
            self._fail(one_line(error) or type(error).__name__)
        if left:
            self._fail("it ends too early")
        return b"".join(parts)

    def _fail(self, reason: str) -> NoReturn:
        raise UserError(f"`{self._name}` must hold an array that can be read, got {self._where}: {reason}")


def opened(path: Path, file: IO[bytes], name: str) -> zipfile.ZipFile:
    """A .npz archive.

    Raises:
        UserError: it is none.
    """
    try:
        return zipfile.ZipFile(file)
    except _BROKEN as error:
        raise UserError(f"`{name}` must be a .npz archive, got {path}: {one_line(error)}") from None


def member(archive: zipfile.ZipFile, key: str, path: Path, name: str) -> ArrayFile:
    """An array of a .npz archive."""
    where = f"{key} of {path}"
    try:
        info = archive.getinfo(f"{key}.npy")
        file = archive.open(info)
    except (*_BROKEN, KeyError, RuntimeError) as error:
        raise UserError(f"`{name}` must hold an array that can be read, got {where}: {one_line(error)}") from None
    return ArrayFile(where, file, info.file_size, path=None, name=name)


def single(path: Path, file: IO[bytes], name: str) -> ArrayFile:
    """The array of a .npy file."""
    return ArrayFile(str(path), file, path.stat().st_size, path=path, name=name)
