"""Parquet as columns of numbers and text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyclass.data._cells import TableCells, Values
from manyclass.data.files import one_line, reading
from manyclass.errors import UserError

_MAX_BATCH_ROWS = 4096
_BATCH_CELLS = 1 << 22


class ParquetTable:
    """A Parquet file. Numbers, truth values, dates and times are numbers; strings, and categories of them, are text.

    Args:
        path: the file.
        name: the user's name for the file, for errors.

    Raises:
        UserError: pyarrow is not installed, or the file cannot be read. `cells` raises it if the file is broken.
    """

    unit = "row"

    def __init__(self, path: Path, *, name: str) -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise UserError(
                f"`{name}` is Parquet, which needs pyarrow: pip install 'manyclass[parquet]', got {path}"
            ) from None
        self.path, self._name = path, name
        with reading(path, name):
            self._size = path.stat().st_size
            if not self._size:
                raise UserError(f"`{name}` must hold rows, got nothing in {path}")
        with self._opened() as file:
            schema = self._guarded(lambda: file.schema_arrow)
            self.columns: tuple[str, ...] = self._guarded(lambda: tuple(schema.names))
            self.types = {column: _column_type(schema.field(i).type) for i, column in enumerate(self.columns)}

    def cells(self, columns: Sequence[str], *, label: str | None = None) -> Iterator[TableCells]:
        """Yield all rows, a few thousand at a time; see `TableFile`."""
        chosen = {*columns, label}
        wanted = [column for column in self.columns if column in chosen]
        size = min(_MAX_BATCH_ROWS, 1 + _BATCH_CELLS // max(1, len(wanted)))
        with self._opened() as file:
            total = max(1, self._guarded(lambda: file.metadata.num_rows))
            stream = iter(self._guarded(lambda: file.iter_batches(batch_size=size, columns=wanted)))
            done = 0
            while (batch := self._guarded(lambda: next(stream, None))) is not None:
                fault: UserError | None = None
                try:
                    cells = self._guarded(lambda batch=batch: self._values(batch, label))
                except UserError as error:
                    batch, fault = self._before_fault(batch, label), error
                    cells = self._values(batch, label)
                number = batch.num_rows
                if number:
                    yield TableCells(
                        range(done, done + number), cells, min(self._size, self._size * (done + number) // total)
                    )
                done += number
                if fault is not None:
                    raise UserError(f"{fault} in row {done}")

    def _before_fault(self, batch: Any, label: str | None) -> Any:
        """Return the rows before the first one that cannot be converted."""
        for row in range(batch.num_rows):
            try:
                self._guarded(lambda row=row: self._values(batch.slice(row, 1), label))
            except UserError:
                return batch.slice(0, row)
        return batch.slice(0, 0)

    def _values(self, batch: Any, label: str | None) -> dict[str, Values]:
        batch.validate(full=True)
        names = batch.schema.names
        return {
            name: _labels(batch.column(i)) if name == label else _values(batch.column(i), self.types[name])
            for i, name in enumerate(names)
        }

    def _opened(self) -> Any:
        import pyarrow.parquet

        return self._guarded(lambda: pyarrow.parquet.ParquetFile(self.path, page_checksum_verification=True))

    def _guarded(self, read: Any) -> Any:
        """Return the result of `read`.

        Raises:
            UserError: the file is broken where `read` reads it.
        """
        import pyarrow

        try:
            with reading(self.path, self._name):
                return read()
        except (pyarrow.ArrowException, ValueError, OverflowError, KeyError, NotImplementedError) as error:
            reason = one_line(error)[:200]
            raise UserError(f"`{self._name}` must be Parquet, got {self.path}: {reason}") from None


def _column_type(type_: Any) -> str:
    """Return "number", "text", or pyarrow's name of a type that makes no features."""
    from pyarrow import types

    if types.is_dictionary(type_):
        return _column_type(type_.value_type)
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return "text"
    numbers = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_temporal)
    return "number" if any(is_one(type_) for is_one in numbers) and not types.is_interval(type_) else str(type_)


def _labels(column: Any) -> list[str]:
    return ["" if label is None else str(label) for label in column.to_pylist()]


def _values(column: Any, column_type: str) -> Values:
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column_type == "null":
        return [""] * len(column)
    if column_type == "text":
        return [text or "" for text in column.to_pylist()]
    if types.is_temporal(column.type):
        # A count of days or fractions of a second: standardising removes the unit.
        column = column.cast(pyarrow.int32() if column.type.bit_width == 32 else pyarrow.int64())
    values = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.float64)
