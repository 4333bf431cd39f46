"""Rows of CSV, TSV and Parquet: a label column, columns of numbers, and columns of text."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from manyclass.data._cells import TableCells, TableFile, Values
from manyclass.data._csv import CsvTable
from manyclass.data._hashing import hashed
from manyclass.data._parquet import ParquetTable
from manyclass.data.chunks import Chunk, RowError, check_format, until_fault
from manyclass.data.files import ReadProgress, reading, shown
from manyclass.data.names import label_fault
from manyclass.data.schema import COLUMN_TYPES, Column, Schema
from manyclass.errors import UserError

WIDTH = 2**18  # features that words are hashed into
LABELS = ("label", "target", "class", "y")  # default names of the label column
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_SAMPLE_ROWS = 10_000  # types are inferred from them
_LISTED_COLUMNS = 20  # named in an error


class TableReader:
    """Rows of a table with named columns.

    A column of numbers is one feature, standardised; a missing number (an empty cell, NA, NaN, null or none) counts as
    the mean. Any other column is text: its words in lower case are hashed. Types are inferred from the first 10,000
    rows; mean and deviation come from a first pass over all rows.

    Args:
        path: the file.
        format: "csv", "tsv" or "parquet".
        label: the column that holds the labels. None: the schema's, or label, target, class or y.
        width: the number of features that words are hashed into.
        schema: schema of a trained model: its columns must exist, others are ignored, and labels may be missing. None:
            a new one for these rows.
        labelled: with a schema, True to read labels.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and in total by the first pass.

    Raises:
        UserError: the file cannot be read, or a column is missing. `chunks` raises it for a cell that is not a number
            in a column of numbers, a row without a label, and a row of another length than the header.
    """

    def __init__(
        self,
        path: Path,
        *,
        format: str,
        label: str | None = None,
        width: int = WIDTH,
        schema: Schema | None = None,
        labelled: bool = True,
        name: str = "data",
        progress: ReadProgress | None = None,
    ) -> None:
        check_format(format, schema, path, name)
        self.path, self._name = path, name
        with reading(path, name):
            self.size = path.stat().st_size
        delimiter = "\t" if format == "tsv" else ","
        self._table: TableFile = (
            ParquetTable(path, name=name) if format == "parquet" else CsvTable(path, delimiter=delimiter, name=name)
        )
        self._check_names()
        self._label = self._label_column(label, schema) if labelled else None
        self.labelled = self._label is not None
        self.schema = self._inferred(format, width, progress) if schema is None else schema
        known = set(self._table.columns)
        for column in self.schema.columns:
            if column.name not in known:
                self._fail(f"must have the column {column.name!r}, as the model's had, got {self._listed()}")
            found = self._table.types.get(column.name, column.type)
            # In a column of type null all values are missing.
            if found not in (column.type, "null"):
                self._fail(f"must hold {column.type} in column {column.name!r}, got {found}")
        numbers = [column for column in self.schema.columns if column.type == "number"]
        self._number_names = [column.name for column in numbers]
        self._text_names = [column.name for column in self.schema.columns if column.type == "text"]
        self._means = np.array([column.mean for column in numbers], dtype=np.float64)
        self._scales = np.array([column.scale for column in numbers], dtype=np.float64)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows, in chunks of at most a few thousand."""
        seen = False
        for cells in self._table.cells([column.name for column in self.schema.columns], label=self._label):
            seen = True

            def made(number: int, cells: TableCells = cells) -> Chunk:
                cells = cells.first(number)
                return Chunk(self._features(cells), self._labels(cells), cells.done)

            yield from until_fault(len(cells.places), made)
        if not seen:
            self._fail("must hold rows, got none")

    def _check_names(self) -> None:
        known = set[str]()
        for i, column in enumerate(self._table.columns, 1):
            if not column:
                self._fail(f"must have a name for each column, got none for column {i}; leave out a row index")
            if column in known:
                self._fail(f"must have columns of different names, got {shown(column)} twice")
            known.add(column)

    def _label_column(self, label: str | None, schema: Schema | None) -> str | None:
        names = self._table.columns
        if label is not None:
            if label not in names:
                raise UserError(f"`label` must be a column of {self.path}, one of {self._listed()}, got {label!r}")
            return label
        if schema is not None:
            return schema.label if schema.label in names else None
        usual = {column.lower(): column for column in reversed(names)}
        found = next((usual[column] for column in LABELS if column in usual), None)
        if found is None:
            self._fail(f"must have a column called {', '.join(LABELS)}, or one `label` names, got {self._listed()}")
        return found

    def _inferred(self, format: str, width: int, progress: ReadProgress | None) -> Schema:
        """Infer the schema: types from the first rows, then moments in a pass over all rows."""
        from sklearn.preprocessing import StandardScaler

        names = [column for column in self._table.columns if column != self._label]
        if not names:
            self._fail(f"must have a column besides its labels, got {self._listed()}")
        for column in names:
            found = self._table.types.get(column, "text")
            if found not in COLUMN_TYPES:
                self._fail(f"must hold numbers or text in each column, got {found} in {column!r}")
        types = self._table.types or self._inferred_types(names)
        numbers = [column for column in names if types[column] == "number"]
        scaler, empty = StandardScaler(), True
        for cells in self._table.cells(names):
            empty = empty and not len(cells.places)
            if numbers and len(cells.places):
                # Sums of squares may overflow; `_number_column` then leaves the column as it is.
                with np.errstate(all="ignore"):
                    scaler.partial_fit(self._numbers(cells, numbers))
            if progress is not None:
                progress(cells.done, self.size)
        if empty:
            self._fail("must hold rows, got none")
        moments = dict(zip(numbers, zip(scaler.mean_, scaler.var_, strict=True), strict=True)) if numbers else {}
        columns = tuple(
            _number_column(column, *map(float, moments[column])) if column in moments else Column(column, "text")
            for column in names
        )
        text = len(numbers) < len(columns)
        width = width if text else 0
        return Schema(format, len(numbers) + width, text, label=self._label, columns=columns, width=width)

    def _inferred_types(self, names: Sequence[str]) -> dict[str, str]:
        """Infer types from the first rows: a column of numbers holds one, and nothing but numbers and missing ones."""
        held, left = dict.fromkeys(names, False), _SAMPLE_ROWS
        for cells in self._table.cells(names):
            for column in list(held):
                for cell in cells.columns[column]:
                    number = _number(str(cell))
                    if math.isinf(number):
                        del held[column]
                        break
                    if number == number:
                        held[column] = True
            left -= len(cells.places)
            if left <= 0:
                break
        return {column: "number" if held.get(column) else "text" for column in names}

    def _features(self, cells: TableCells) -> Any:
        from scipy.sparse import csr_array, hstack

        with np.errstate(over="ignore"):
            standard = (self._numbers(cells, self._number_names) - self._means) / self._scales
            numbers = np.where(np.isnan(standard), 0, standard).astype(np.float32)
        if (bad := _first_bad(~np.isfinite(numbers))) is not None:
            column = self._number_names[bad[1]]
            fault = f"must have numbers near the others of column {column!r}, got a far larger one"
            raise self._row_error(fault, cells, bad[0])
        if not self.schema.sparse:
            return numbers
        words = hashed([(name, _texts(cells.columns[name])) for name in self._text_names], self.schema.width)
        return csr_array(hstack([csr_array(numbers), words], format="csr", dtype=np.float32))

    def _numbers(self, cells: TableCells, columns: Sequence[str]) -> "np.ndarray[Any, Any]":
        """Return the numbers [n, columns], float64, NaN where missing."""
        values = [cells.columns[column] for column in columns]
        if any(isinstance(column, np.ndarray) for column in values):
            values = [column if isinstance(column, np.ndarray) else _floats(column) for column in values]
            found = np.array(values, dtype=np.float64)
        else:
            found = _floats(itertools.chain.from_iterable(values))
        found = found.reshape(len(columns), len(cells.places)).T
        if (bad := _first_bad(np.isinf(found))) is not None:
            row, column = bad
            value = shown(str(values[column][row]))
            raise self._row_error(f"must have finite numbers in column {columns[column]!r}, got {value}", cells, row)
        return found

    def _labels(self, cells: TableCells) -> list[tuple[str, ...]] | None:
        if self._label is None:
            return None
        labels = [label.strip() for label in _texts(cells.columns[self._label])]
        for row, label in enumerate(labels):
            if fault := label_fault(label):
                raise self._row_error(f"{fault} in column {self._label!r}", cells, row)
        return [(label,) for label in labels]

    def _listed(self) -> str:
        names = self._table.columns
        rest = f" and {len(names) - _LISTED_COLUMNS} more" if len(names) > _LISTED_COLUMNS else ""
        return ", ".join(shown(column) for column in names[:_LISTED_COLUMNS]) + rest

    def _row_error(self, fault: str, cells: TableCells, row: int) -> RowError:
        return RowError(f"`{self._name}` {fault} in {self._table.unit} {cells.places[row]} of {self.path}", row)

    def _fail(self, fault: str) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in {self.path}")


def _number_column(name: str, mean: float, variance: float) -> Column:
    scale = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else 1.0
    # A column that is constant up to rounding, or without a value, is not scaled.
    flat = scale <= 1e-12 * abs(mean)
    return Column(name, "number", mean if math.isfinite(mean) else 0.0, 1.0 if flat else scale)


def _texts(values: Values) -> list[str]:
    assert isinstance(values, list)
    return values


def _floats(cells: Iterable[str]) -> "np.ndarray[Any, Any]":
    """Return the numbers in cells, see `_number`."""
    held = list(cells)
    try:
        found = np.fromiter(map(float, held), np.float64, len(held))
    except ValueError:
        found = None
    # Python reads 1_2 as 12; other programs do not.
    if found is None or any("_" in cell for cell in held):
        return np.fromiter(map(_number, held), np.float64, len(held))
    return found


def _number(cell: str) -> float:
    """Return the number in a cell, NaN if it is missing, or inf if it is not a finite number."""
    try:
        return math.inf if "_" in cell else float(cell)
    except ValueError:
        return math.nan if cell.strip().lower() in _MISSING else math.inf


def _first_bad(bad: "np.ndarray[Any, Any]") -> tuple[int, int] | None:
    """Return the first row of [n, F] with a True, and its first column with one; None if there is none."""
    if not bad.any():
        return None
    row = int(bad.any(1).argmax())
    return row, int(bad[row].argmax())
