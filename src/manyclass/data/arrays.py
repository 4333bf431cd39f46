"""Rows in NumPy's files: .npy, and .npz with a matrix, dense or as SciPy saves sparse ones.

Sparse rows are read here and not by `scipy.sparse.load_npz`, which loads the whole matrix.
"""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from manyclass.data._npy import Array, ArrayFile, open_archive, open_member
from manyclass.data.chunks import Chunk, RowError, as_schema, check_format, until_fault, width_fault
from manyclass.data.files import reading, shown
from manyclass.data.names import MAX_LABEL_CHARACTERS, label_fault
from manyclass.data.schema import MAX_FEATURES, Schema
from manyclass.errors import UserError

_MAX_CHUNK_ROWS = 8192
_CHUNK_BYTES = 1 << 24  # approximate size of a chunk
_MAX_ROW_BYTES = 64 << 20  # size of a dense row
_LABELS = "labels"  # the user's name for the file of labels
_SPARSE_ARRAYS = ("data", "indices", "indptr", "shape", "format")


class _Matrix(Protocol):
    """A matrix [N, F] whose rows are read from first to last."""

    sparse: bool
    shape: tuple[int, int]

    def read(self, number: int) -> tuple[Any, UserError | None]:
        """Return the next rows up to the first that cannot be read, and its fault."""
        ...

    def chunk_rows(self) -> int: ...


class ArrayReader:
    """Rows of a .npy file, or of a .npz archive with arrays `X` and `y`.

    The archive may have, instead of `X`, the arrays that `scipy.sparse.save_npz` writes for a CSR matrix.

    Args:
        path: the file.
        archive: True for .npz.
        labels: a .npy file of ints or strings [N]. None: `y` of the archive; without it there are no labels.
        schema: schema of a trained model. None: a new one for these rows.
        name: the user's name for the file, for errors.

    Raises:
        UserError: a file cannot be read or is not an array of numbers [N, F], or the numbers of labels and rows differ.
            `chunks` raises it for a value that is not finite, and for an impossible index or label.
    """

    def __init__(
        self,
        path: Path,
        *,
        archive: bool,
        labels: Path | None = None,
        schema: Schema | None = None,
        name: str = "data",
    ) -> None:
        self.path, self._labels, self._name, self._given = path, labels, name, schema
        self._format = "npz" if archive else "npy"
        with self._opened() as (matrix, y):
            self.size = path.stat().st_size
            self.schema = schema or Schema(self._format, matrix.shape[1], sparse=matrix.sparse)
            self.labelled = y is not None
            width = matrix.shape[1]
        check_format(self._format, schema, path, name)
        if fault := width_fault(width, schema):
            self._fail(fault)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows, in chunks of at most a few thousand."""
        with self._opened() as (matrix, y):
            total, begin = matrix.shape[0], 0
            number = matrix.chunk_rows()
            while begin < total:
                features, fault = matrix.read(number)
                labels = None if y is None else y.read(number)
                done = begin + features.shape[0]

                def made(rows: int, features: Any = features, labels: Any = labels, begin: int = begin) -> Chunk:
                    names = None if labels is None else self._names(labels[:rows], begin)
                    self._finite(features[:rows], begin)
                    return Chunk(as_schema(features[:rows], self._given), names, self.size * (begin + rows) // total)

                yield from until_fault(features.shape[0], made)
                if fault is not None:
                    raise fault
                begin = done

    @contextmanager
    def _opened(self) -> Iterator[tuple[_Matrix, ArrayFile | None]]:
        """Open the matrix and the labels, both at their first row."""
        with reading(self.path, self._name), ExitStack() as stack:
            matrix: _Matrix
            y = None
            if self._format == "npy":
                matrix = _Dense(ArrayFile(str(self.path), self.path, self.path.stat().st_size, name=self._name), self)
            else:
                file = stack.enter_context(self.path.open("rb"))
                archive = stack.enter_context(open_archive(self.path, file, self._name))
                keys = [key.removesuffix(".npy") for key in archive.namelist()]
                matrix = self._of_archive(archive, keys)
                if "y" in keys:
                    y = open_member(archive, "y", self.path, self._name)
            if self._labels is not None:
                with reading(self._labels, _LABELS):
                    y = ArrayFile(str(self._labels), self._labels, self._labels.stat().st_size, name=_LABELS)
            if not matrix.shape[0]:
                self._fail("must hold rows, got none")
            if y is not None:
                self._check_labels(y, matrix.shape[0])
            yield matrix, y

    def _of_archive(self, archive: zipfile.ZipFile, keys: Sequence[str]) -> _Matrix:
        if len(set(keys)) < len(keys):
            self._fail("must have arrays of different names, got one twice")
        if "X" in keys:
            return _Dense(open_member(archive, "X", self.path, self._name), self)
        if not set(_SPARSE_ARRAYS) <= set(keys):
            got = shown(", ".join(sorted(keys)))
            self._fail(f"must have an array X, or those of a sparse matrix ({', '.join(_SPARSE_ARRAYS)}), got {got}")
        return _Sparse({key: open_member(archive, key, self.path, self._name) for key in _SPARSE_ARRAYS}, self)

    def _check_labels(self, y: ArrayFile, rows: int) -> None:
        what, where = ("`y`", self.path) if self._labels is None else (f"`{_LABELS}`", self._labels)
        if y.dtype.kind not in "iubUS":
            raise UserError(f"{what} must hold ints or strings, got {y.dtype} in {where}")
        if y.shape != (rows,):
            raise UserError(f"{what} must have a label for each of {rows:,} rows, got shape {list(y.shape)} in {where}")
        characters, limit = y.dtype.itemsize // {"U": 4}.get(y.dtype.kind, 1), MAX_LABEL_CHARACTERS
        if y.dtype.kind in "US" and characters > limit * (1 if y.dtype.kind == "U" else 4):
            raise UserError(f"{what} must have labels of at most {limit:,} characters, got {y.dtype} in {where}")

    def _names(self, y: Array, begin: int) -> list[tuple[str, ...]]:
        where = self.path if self._labels is None else self._labels
        try:
            texts = [label.decode() if isinstance(label, bytes) else str(label) for label in y.tolist()]
        except (UnicodeDecodeError, ValueError, SystemError):
            raise UserError(f"`{self._name}` must have labels of Unicode characters, got others in {where}") from None
        if y.dtype.kind in "US":
            for i, text in enumerate(texts):
                if fault := label_fault(text):
                    raise RowError(f"`{self._name}` {fault} in row {begin + i} of {where}", i)
        return [(text,) for text in texts]

    def _finite(self, features: Any, begin: int) -> None:
        values = features if isinstance(features, np.ndarray) else features.data
        if np.isfinite(values).all():
            return
        if isinstance(features, np.ndarray):
            row, column = (int(i) for i in np.argwhere(~np.isfinite(features))[0])
            value = features[row, column]
        else:
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            row = int(np.searchsorted(features.indptr, place, side="right")) - 1
            column, value = int(features.indices[place]), values[place]
        fault = f"must have finite values, in 32 bits, got {value} in row {begin + row}, column {column}"
        raise RowError(f"`{self._name}` {fault} in {self.path}", row)

    def _fail(self, fault: str) -> NoReturn:
        raise self._fault(fault)

    def _fault(self, fault: str) -> UserError:
        return UserError(f"`{self._name}` {fault} in {self.path}")


class _Dense:
    sparse = False

    def __init__(self, array: ArrayFile, reader: ArrayReader) -> None:
        if len(array.shape) != 2 or not array.shape[1] or array.shape[1] > MAX_FEATURES:
            reader._fail(f"must be a matrix [N, F], got shape {list(array.shape)}")
        if array.dtype.kind not in "fiub":
            reader._fail(f"must hold numbers, got {array.dtype}")
        self._array, self.shape = array, (array.shape[0], array.shape[1])
        self._row_bytes: int = self.shape[1] * max(4, array.dtype.itemsize)
        if self._row_bytes > _MAX_ROW_BYTES:
            reader._fail(f"must have dense rows of at most {_MAX_ROW_BYTES >> 20} MiB, got {self.shape[1]:,} features")

    def chunk_rows(self) -> int:
        return max(1, min(_MAX_CHUNK_ROWS, _CHUNK_BYTES // self._row_bytes))

    def read(self, number: int) -> tuple[Array, None]:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.array(self._array.read(number), dtype=np.float32)
        self._array.free_pages()
        return rows, None


class _Sparse:
    sparse = True

    def __init__(self, arrays: dict[str, ArrayFile], reader: ArrayReader) -> None:
        self._reader = reader
        self._values, self._columns, self._starts = (arrays[key] for key in ("data", "indices", "indptr"))
        layout = arrays["format"].whole() if len(arrays["format"].shape) == 0 else np.array("?")
        form = layout.item().decode("ascii", "replace") if layout.dtype.kind == "S" else str(layout)
        if form != "csr":
            reader._fail(f"must hold a sparse matrix as CSR, got {form!r}")
        shape = arrays["shape"]
        if shape.shape != (2,) or shape.dtype.kind not in "iu":
            reader._fail(f"must hold a sparse matrix [N, F], got shape of shape {list(shape.shape)}")
        rows, width = (int(i) for i in shape.whole())
        if len(self._starts) != rows + 1 or not 1 <= width <= MAX_FEATURES:
            reader._fail(f"must hold a sparse matrix [N, F], got {[rows, width]} and {len(self._starts):,} starts")
        if self._values.shape != self._columns.shape or len(self._values.shape) != 1 or len(self._starts.shape) != 1:
            shapes = f"{list(self._values.shape)} and {list(self._columns.shape)}"
            reader._fail(f"must have as many sparse values as indices, got {shapes}")
        if self._values.dtype.kind not in "fiub" or {self._columns.dtype.kind, self._starts.dtype.kind} - set("iu"):
            reader._fail(f"must hold numbers at whole indices, got {self._values.dtype} at {self._columns.dtype}")
        self.shape = (rows, width)
        self._end = int(self._starts.read(1)[0])
        self._done = 0
        if self._end:
            reader._fail(f"must have sparse rows that start at 0, got {self._end}")

    def chunk_rows(self) -> int:
        entries = max(1, len(self._values) // self.shape[0])
        return max(1, min(_MAX_CHUNK_ROWS, _CHUNK_BYTES // (8 * entries)))

    def read(self, number: int) -> tuple[Any, UserError | None]:
        from scipy.sparse import csr_array

        fault = None

        first = self._done
        ends = self._starts.read(number).astype(np.int64)
        starts = np.concatenate([[self._end], ends])
        last = len(self._values)
        bad = np.flatnonzero((np.diff(starts) < 0) | (ends > last))
        if len(bad) or (first + len(ends) == self.shape[0] and int(starts[-1]) != last):
            place = int(bad[0]) if len(bad) else len(ends) - 1
            fault = self._reader._fault(
                f"must have sparse rows one after the other within {last:,} values, got an end at {ends[place]:,}"
                f" in row {first + place}"
            )
            starts, ends = starts[: place + 1], ends[:place]
        entries = int(starts[-1] - starts[0])
        with np.errstate(over="ignore", invalid="ignore"):
            values = self._values.read(entries).astype(np.float32)
        columns = self._columns.read(entries)
        outside = np.flatnonzero((columns < 0) | (columns >= self.shape[1]))
        if len(outside):
            row = int(np.searchsorted(starts - starts[0], outside[0], side="right")) - 1
            got = columns[outside[0]]
            fault = self._reader._fault(
                f"must have sparse indices in [0, {self.shape[1]:,}), got {got} in row {first + row}"
            )
            starts, ends, entries = starts[: row + 1], ends[:row], int(starts[row] - starts[0])
            values, columns = values[:entries], columns[:entries]
        self._end, self._done = int(starts[-1]), first + len(ends)
        index = np.int32 if entries <= MAX_FEATURES else np.int64
        where = ((starts - starts[0]).astype(index), columns.astype(index))
        return csr_array((values, where[1], where[0]), shape=(len(ends), self.shape[1])), fault
