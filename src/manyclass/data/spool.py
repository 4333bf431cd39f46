"""Rows of a file as memory-mapped binary files: parsed once, then trained on in bounded memory."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from manyclass.data.chunks import Chunk, Reader
from manyclass.data.files import ReadProgress, shown, writing
from manyclass.data.names import Names
from manyclass.data.rows import Rows
from manyclass.errors import UserError
from manyclass.storage import atomic_write

_DTYPES = {
    "features.bin": np.float32,  # dense rows [N, F]
    "values.bin": np.float32,  # values of sparse rows, concatenated
    "columns.bin": np.int32,  # column of each value
    "starts.bin": np.int64,  # position of each row's first value
    "labels.bin": np.int64,
    "label_starts.bin": np.int64,
}
_INDEX = "rows.json"
_FORMAT = 1
_INT32_ENTRIES = 2**31  # with fewer, starts are int32


def spool(
    reader: Reader, folder: Path, *, names: Names, progress: ReadProgress | None = None, name: str = "data"
) -> Rows:
    r"""Write the rows of a file into a folder, and memory-map them.

    Memory holds a chunk of rows and the names, whatever the file's size.

    Args:
        reader: reader of the file.
        folder: created if missing; rows already in it are replaced.
        names: names of the classes; new labels are added.
        progress: called with the bytes of the file read and in total.
        name: the user's name for the file, for errors.

    Raises:
        UserError: the disk is full or cannot be written to, the file cannot be read, has no labels, or fewer than
            two classes. Nothing is left in the folder.

    Example:
        >>> import tempfile
        >>> from manyclass.data import open_rows
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.svm").write_text("cat 1:0.5 3:1\ndog 2:1\n")
        >>> names = Names()
        >>> rows = spool(open_rows(folder / "a.svm"), folder / "rows", names=names)
        >>> len(rows), rows.num_features, rows.labels.tolist(), list(names)
        (2, 3, [0, 1], ['cat', 'dog'])
    """
    if not reader.labelled:
        raise UserError(f"`{name}` must have labels to learn from, got none in {reader.path}")
    # The index is removed first: without it the other files are not read.
    with writing(folder, (_INDEX, *_DTYPES, "starts.bin.part")):
        with ExitStack() as stack:
            files = _Files(folder, stack)
            for chunk in reader.chunks():
                files.append(chunk, names)
                if progress is not None:
                    progress(chunk.done, reader.size)
        if not files.rows:
            raise UserError(f"`{name}` must hold rows, got none in {reader.path}")
        if len(names) < 2:
            got = f"only {shown(names[0])}" if len(names) else "no label"
            raise UserError(f"`{name}` must have at least two classes, got {got} in {reader.path}")
        files.finish(reader.schema.num_features)
        return open_spool(folder)


def open_spool(folder: Path) -> Rows:
    """Memory-map the rows that `spool` wrote into a folder.

    Raises:
        UserError: the folder holds no rows, or a file has the wrong size.
    """
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != _FORMAT:
            raise ValueError(f"format {index['format']}, {_FORMAT} is known")
        rows, width, entries, labels = (int(index[key]) for key in ("rows", "num_features", "entries", "labels"))
        sparse, several = bool(index["sparse"]), bool(index["several"])
    except OSError as error:
        raise UserError(f"`folder` must hold rows, got {folder}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"`folder` must hold rows, got {path}: {shown(str(error))}") from None
    features: Any
    if sparse:
        features = _csr(folder, rows, width, entries)
    else:
        features = _mapped(folder, "features.bin", rows * width).reshape(rows, width)
    starts = _mapped(folder, "label_starts.bin", rows + 1) if several else None
    return Rows(features, _mapped(folder, "labels.bin", labels), starts)


class _Files:
    """The open files of a folder while rows are added."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._open: dict[str, IO[bytes]] = {}
        self.rows = self._entries = self._labels = 0
        self._sparse = self._several = False
        self._add("starts.bin", [0])
        self._add("label_starts.bin", [0])

    def append(self, chunk: Chunk, names: Names) -> None:
        """Write a chunk of rows."""
        features, labels = chunk.features, chunk.labels
        assert labels is not None
        if isinstance(features, np.ndarray):
            self._add("features.bin", features)
        else:
            self._sparse = True
            self._add("values.bin", features.data)
            self._add("columns.bin", features.indices)
            self._add("starts.bin", features.indptr[1:].astype(np.int64) + self._entries)
            self._entries += int(features.indptr[-1])
        ends = self._labels + np.cumsum([len(row) for row in labels])
        self._add("labels.bin", names.number(label for row in labels for label in row))
        self._add("label_starts.bin", ends)
        self._several = self._several or any(len(row) != 1 for row in labels)
        self._labels = int(ends[-1])
        self.rows += len(labels)

    def finish(self, num_features: int) -> None:
        """Close the files and write the index."""
        for file in self._open.values():
            file.close()
        if not self._sparse:
            (self._folder / "starts.bin").unlink()
        elif self._entries < _INT32_ENTRIES:
            self._narrow_starts()
        if not self._several:
            (self._folder / "label_starts.bin").unlink()
        index = {
            "format": _FORMAT,
            "rows": self.rows,
            "num_features": num_features,
            "entries": self._entries,
            "labels": self._labels,
            "sparse": self._sparse,
            "several": self._several,
        }
        # Last and atomic: if it is there, all other files are complete.
        with atomic_write(self._folder / _INDEX) as temporary:
            temporary.write_text(json.dumps(index), encoding="utf-8")

    def _add(self, name: str, values: Any) -> None:
        if name not in self._open:
            self._open[name] = self._stack.enter_context((self._folder / name).open("wb"))
        # Not with `tofile`, whose errors have no errno.
        self._open[name].write(np.ascontiguousarray(values, dtype=_DTYPES[name]).reshape(-1).data)

    def _narrow_starts(self) -> None:
        """Convert starts to int32, the dtype of columns: if they differ, SciPy copies the narrower to memory."""
        path = self._folder / "starts.bin"
        narrow = self._folder / "starts.bin.part"
        with path.open("rb") as old, narrow.open("wb") as new:
            while len(starts := np.fromfile(old, dtype=np.int64, count=1 << 20)):
                new.write(starts.astype(np.int32).data)
        narrow.replace(path)


def _csr(folder: Path, rows: int, width: int, entries: int) -> Any:
    from scipy.sparse import csr_array

    starts = np.int32 if entries < _INT32_ENTRIES else np.int64
    # The constructor would read all indices to check them.
    matrix = csr_array((rows, width), dtype=np.float32)
    matrix.data = _mapped(folder, "values.bin", entries)
    matrix.indices = _mapped(folder, "columns.bin", entries)
    matrix.indptr = _mapped(folder, "starts.bin", rows + 1, starts)
    return matrix


def _mapped(folder: Path, name: str, length: int, dtype: Any = None) -> "np.ndarray[Any, Any]":
    path = folder / name
    dtype = np.dtype(_DTYPES[name] if dtype is None else dtype)
    try:
        size = path.stat().st_size
        if size != length * dtype.itemsize:
            raise UserError(f"`folder` must hold {length * dtype.itemsize:,} bytes in {path}, got {size:,}")
        return np.memmap(path, dtype, "r") if length else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"`folder` must hold rows, got {path}: {error.strerror}") from None
