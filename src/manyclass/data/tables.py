"""Rows of CSV, TSV and Parquet: a label column, columns of numbers, and columns of text."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from manyclass.data._cells import TableCells, TableFile, Values
from manyclass.data._csv import CsvTable
from manyclass.data._hashing import hashed
from manyclass.data._parquet import ParquetTable
from manyclass.data.chunks import Chunk, check_format
from manyclass.data.files import ReadProgress, reading, shown
from manyclass.data.names import label_fault
from manyclass.data.schema import COLUMN_TYPES, Column, Schema
from manyclass.errors import UserError

WIDTH = 2**18  # features that words are hashed into
LABELS = ("label", "target", "class", "y")  # default names of the label column
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_SAMPLE_ROWS = 10_000  # types are inferred from them
_MAX_SAMPLE_BATCHES = 8  # reached before the rows if rows are long
_LISTED_COLUMNS = 20  # named in an error


class TableReader:
    """Rows of a table with named columns.

    A column of numbers is one feature, standardised; a missing number (an empty cell, NA, NaN, null or none) counts as
    the mean. Any other column is text: its words in lower case are hashed. Types are inferred from the first 10,000
    rows, or fewer if they are long; mean and deviation come from a first pass over all rows.

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
        for column in self.schema.columns:
            if column.name not in self._table.columns:
                self._fail(f"must have the column {column.name!r}, as the model's had, got {self._listed()}")
            found = self._table.types.get(column.name, column.type)
            # In a column of type null all values are missing.
            if found not in (column.type, "null"):
                self._fail(f"must hold {column.type} in column {column.name!r}, got {found}")

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows, in chunks of at most a few thousand."""
        seen = False
        for cells in self._table.cells([column.name for column in self.schema.columns], label=self._label):
            seen = True
            yield Chunk(self._features(cells), self._labels(cells), cells.done)
        if not seen:
            self._fail("must hold rows, got none")

    def _check_names(self) -> None:
        names = self._table.columns
        for i, column in enumerate(names, 1):
            if not column:
                self._fail(f"must have a name for each column, got none for column {i}; leave out a row index")
            if column in names[: i - 1]:
                self._fail(f"must have columns of different names, got {shown(column)} twice")

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
        """Infer the schema in a first pass over all rows."""
        from sklearn.preprocessing import StandardScaler

        names = [column for column in self._table.columns if column != self._label]
        if not names:
            self._fail(f"must have a column besides its labels, got {self._listed()}")
        for column in names:
            found = self._table.types.get(column, "text")
            if found not in COLUMN_TYPES:
                self._fail(f"must hold numbers or text in each column, got {found} in {column!r}")
        batches = self._table.cells(names)
        sample, size = [], 0
        for cells in batches:
            sample.append(cells)
            size += len(cells.places)
            if size >= _SAMPLE_ROWS or len(sample) == _MAX_SAMPLE_BATCHES:
                break
        if not size:
            self._fail("must hold rows, got none")
        types = {column: self._table.types.get(column) or _column_type(sample, column) for column in names}
        numbers = [column for column, found in types.items() if found == "number"]
        scaler = StandardScaler()
        for cells in itertools.chain(sample, batches):
            if numbers and len(cells.places):
                # Sums of squares may overflow; `_number_column` then leaves the column as it is.
                with np.errstate(all="ignore"):
                    scaler.partial_fit(np.stack([self._numbers(cells, column) for column in numbers], 1))
            if progress is not None:
                progress(cells.done, self.size)
        moments = dict(zip(numbers, zip(scaler.mean_, scaler.var_, strict=True), strict=True)) if numbers else {}
        columns = tuple(
            _number_column(column, *map(float, moments[column])) if column in moments else Column(column, "text")
            for column in names
        )
        text = len(numbers) < len(columns)
        width = width if text else 0
        return Schema(format, len(numbers) + width, text, label=self._label, columns=columns, width=width)

    def _features(self, cells: TableCells) -> Any:
        from scipy.sparse import csr_array, hstack

        columns = self.schema.columns
        rows = len(cells.places)
        numbers = np.zeros((rows, sum(column.type == "number" for column in columns)), dtype=np.float32)
        for i, column in enumerate(column for column in columns if column.type == "number"):
            with np.errstate(over="ignore"):
                values = (self._numbers(cells, column.name) - column.mean) / column.scale
                numbers[:, i] = np.where(np.isnan(values), 0, values)
            if not np.isfinite(numbers[:, i]).all():
                place = cells.places[int(np.flatnonzero(~np.isfinite(numbers[:, i]))[0])]
                self._at(f"must have numbers near the others of column {column.name!r}, got a far larger one", place)
        if not self.schema.sparse:
            return numbers
        texts = [(column.name, _texts(cells.columns[column.name])) for column in columns if column.type == "text"]
        words = hashed(texts, self.schema.width)
        return csr_array(hstack([csr_array(numbers), words], format="csr", dtype=np.float32))

    def _numbers(self, cells: TableCells, column: str) -> "np.ndarray[Any, Any]":
        """Return the numbers of a column, float64, NaN where missing."""
        values = cells.columns[column]
        found = values if isinstance(values, np.ndarray) else _floats(values)
        if found is not None and not np.isinf(found).any():
            return found
        for place, value in zip(cells.places, values, strict=True):
            if (number := _number(str(value))) is None or math.isinf(number):
                self._at(f"must have finite numbers in column {column!r}, got {shown(str(value))}", place)
        return np.array([_number(str(value)) for value in values], dtype=np.float64)

    def _labels(self, cells: TableCells) -> list[tuple[str, ...]] | None:
        if self._label is None:
            return None
        labels = [label.strip() for label in _texts(cells.columns[self._label])]
        for place, label in zip(cells.places, labels, strict=True):
            if fault := label_fault(label):
                self._at(f"{fault} in column {self._label!r}", place)
        return [(label,) for label in labels]

    def _listed(self) -> str:
        names = self._table.columns
        rest = f" and {len(names) - _LISTED_COLUMNS} more" if len(names) > _LISTED_COLUMNS else ""
        return ", ".join(shown(column) for column in names[:_LISTED_COLUMNS]) + rest

    def _at(self, fault: str, place: int) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in {self._table.unit} {place} of {self.path}")

    def _fail(self, fault: str) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in {self.path}")


def _number_column(name: str, mean: float, variance: float) -> Column:
    scale = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else 1.0
    # A column that is constant up to rounding, or without a value, is not scaled.
    flat = scale <= 1e-12 * abs(mean)
    return Column(name, "number", mean if math.isfinite(mean) else 0.0, 1.0 if flat else scale)


def _column_type(sample: Sequence[TableCells], column: str) -> str:
    seen = False
    for cells in sample:
        for cell in _texts(cells.columns[column]):
            number = _number(cell)
            if number is None or math.isinf(number):
                return "text"
            seen = seen or not math.isnan(number)
    return "number" if seen else "text"


def _texts(values: Values) -> list[str]:
    assert isinstance(values, list)
    return values


def _floats(cells: list[str]) -> "np.ndarray[Any, Any] | None":
    try:
        found = np.array(list(map(float, cells)), dtype=np.float64)
    except ValueError:
        return None
    # Python reads 1_2 as 12; other programs do not.
    return None if any("_" in cell for cell in cells) else found


def _number(cell: str) -> float | None:
    """Return the number in a cell, NaN if it is missing, or None if it is not a number."""
    if cell.strip().lower() in _MISSING:
        return math.nan
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
