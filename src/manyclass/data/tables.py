"""Rows of CSV, TSV and Parquet: a label column, columns of numbers, and columns of text."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from manyclass.data._cells import Cells, Table, Values
from manyclass.data._csv import CsvTable
from manyclass.data._hashing import hashed
from manyclass.data._parquet import ParquetTable
from manyclass.data.chunks import Chunk, same_kind
from manyclass.data.files import Watch, reading, shown
from manyclass.data.names import label_fault
from manyclass.data.schema import KINDS, Column, Schema
from manyclass.errors import UserError

WIDTH = 2**18
LABELS = ("label", "target", "class", "y")  # what the column of labels is called, if nothing else is said
_MISSING = {"", "na", "n/a", "nan", "null", "none"}
_SAMPLE = 10_000  # rows that tell numbers from text
_BATCHES = 8  # of them, at most, where rows are long
_LISTED = 20  # columns that an error names


class TableReader:
    """Rows of a table with named columns.

    A column of numbers is one feature, standardised; a missing number (an empty cell, NA, NaN, null or none) counts as
    the mean. Any other column is text: its words in small letters are hashed. Which is which is seen from the first
    10,000 rows, or fewer where they are long; mean and deviation come from all rows. For both, the table is read once
    before its rows leave it.

    Args:
        path: the file.
        format: "csv", "tsv" or "parquet".
        label: the column that holds the labels. None: the schema's, or label, target, class or y.
        width: how many features words are hashed into.
        schema: of the rows that a model was trained on: its columns must be there, others are passed over, and labels
            may be missing. None: these are those.
        labelled: whether labels are read, where there is a schema.
        name: what the user knows the path as, for errors.
        watch: told how far the first reading is.

    Raises:
        UserError: the file cannot be read, or has no such columns; while it is read: a cell that is no number in a
            column of numbers, a row without a label, a row of another length than the header.
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
        watch: Watch | None = None,
    ) -> None:
        same_kind(format, schema, path, name)
        self.path, self._name = path, name
        with reading(path, name):
            self.size = path.stat().st_size
        delimiter = "\t" if format == "tsv" else ","
        self._table: Table = (
            ParquetTable(path, name=name) if format == "parquet" else CsvTable(path, delimiter=delimiter, name=name)
        )
        self._check_names()
        self._label = self._label_column(label, schema) if labelled else None
        self._schema = self._learned(format, width, watch) if schema is None else schema
        for column in self._schema.columns:
            if column.name not in self._table.columns:
                self._fail(f"must have the column {column.name!r}, as the model's had, got {self._listed()}")
            known = self._table.kinds.get(column.name, column.kind)
            # A column without a single value is one of missing ones.
            if known not in (column.kind, "null"):
                self._fail(f"must hold {column.kind} in column {column.name!r}, got {known}")

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def labelled(self) -> bool:
        return self._label is not None

    def chunks(self) -> Iterator[Chunk]:
        seen = False
        for cells in self._table.batches([column.name for column in self._schema.columns], label=self._label):
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
            self._fail(f"must have a column called {', '.join(LABELS)}, or `label` say which, got {self._listed()}")
        return found

    def _learned(self, format: str, width: int, watch: Watch | None) -> Schema:
        """What the first reading tells."""
        names = [column for column in self._table.columns if column != self._label]
        if not names:
            self._fail(f"must have a column beside its labels, got {self._listed()}")
        for column in names:
            kind = self._table.kinds.get(column, "text")
            if kind not in KINDS:
                self._fail(f"must hold numbers or text in each column, got {kind} in {column!r}")
        batches = self._table.batches(names)
        sample, size = [], 0
        for cells in batches:
            sample.append(cells)
            size += len(cells.places)
            if size >= _SAMPLE or len(sample) == _BATCHES:
                break
        if not size:
            self._fail("must hold rows, got none")
        kinds = {column: self._table.kinds.get(column) or _kind(sample, column) for column in names}
        moments = {column: _Moments() for column, kind in kinds.items() if kind == "number"}
        for cells in itertools.chain(sample, batches):
            for column, moment in moments.items():
                moment.add(self._numbers(cells, column))
            if watch is not None:
                watch(cells.done, self.size)
        columns = [
            moments[column].column(column) if kind == "number" else Column(column, kind)
            for column, kind in kinds.items()
        ]
        text = len(moments) < len(columns)
        num_features = len(moments) + (width if text else 0)
        return Schema(format, num_features, text, label=self._label, columns=tuple(columns), width=width if text else 0)

    def _features(self, cells: Cells) -> Any:
        from scipy.sparse import csr_array, hstack

        columns = self._schema.columns
        rows = len(cells.places)
        numbers = np.zeros((rows, sum(column.kind == "number" for column in columns)), dtype=np.float32)
        for i, column in enumerate(column for column in columns if column.kind == "number"):
            with np.errstate(over="ignore"):
                values = (self._numbers(cells, column.name) - column.mean) / column.scale
                numbers[:, i] = np.where(np.isnan(values), 0, values)
            if not np.isfinite(numbers[:, i]).all():
                place = cells.places[int(np.flatnonzero(~np.isfinite(numbers[:, i]))[0])]
                self._at(f"must have numbers near the others of column {column.name!r}, got a far larger one", place)
        if not self._schema.sparse:
            return numbers
        texts = [(column.name, _texts(cells.columns[column.name])) for column in columns if column.kind == "text"]
        words = hashed(texts, self._schema.width)
        return csr_array(hstack([csr_array(numbers), words], format="csr", dtype=np.float32))

    def _numbers(self, cells: Cells, column: str) -> "np.ndarray[Any, Any]":
        """float64, NaN where missing."""
        values = cells.columns[column]
        found = values if isinstance(values, np.ndarray) else _floats(values)
        bad = found is None or np.isinf(found).any()
        if not bad:
            return found  # type: ignore[return-value]
        for place, value in zip(cells.places, values, strict=True):
            if (number := _number(str(value))) is None or math.isinf(number):
                self._at(f"must have finite numbers in column {column!r}, got {shown(str(value))}", place)
        return np.array([_number(str(value)) for value in values], dtype=np.float64)

    def _labels(self, cells: Cells) -> list[tuple[str, ...]] | None:
        if self._label is None:
            return None
        labels = [label.strip() for label in _texts(cells.columns[self._label])]
        for place, label in zip(cells.places, labels, strict=True):
            if fault := label_fault(label):
                self._at(f"{fault} in column {self._label!r}", place)
        return [(label,) for label in labels]

    def _listed(self) -> str:
        names = self._table.columns
        rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return ", ".join(shown(column) for column in names[:_LISTED]) + rest

    def _at(self, fault: str, place: int) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in {self._table.unit} {place} of {self.path}")

    def _fail(self, fault: str) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in {self.path}")


class _Moments:
    """Mean and deviation, batch by batch; what is missing is passed over."""

    def __init__(self) -> None:
        self._number, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: "np.ndarray[Any, Any]") -> None:
        values = values[~np.isnan(values)]
        if not len(values):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            number, mean = len(values), float(values.mean())
            squares = float(((values - mean) ** 2).sum())
            both, apart = self._number + number, mean - self._mean
            self._squares += squares + apart * apart * self._number * number / both
            self._mean += apart * number / both
        self._number = both

    def column(self, name: str) -> Column:
        scale = math.sqrt(self._squares / self._number) if self._number else 1.0
        # A column that never changes, but for rounding, says nothing.
        flat = not math.isfinite(scale) or scale <= 1e-12 * abs(self._mean)
        mean = self._mean if math.isfinite(self._mean) else 0.0
        return Column(name, "number", mean, 1.0 if flat else scale)


def _kind(sample: Sequence[Cells], column: str) -> str:
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
    # What Python reads as 12 is not a number elsewhere.
    return None if any("_" in cell for cell in cells) else found


def _number(cell: str) -> float | None:
    """NaN: missing; None: no number."""
    if cell.strip().lower() in _MISSING:
        return math.nan
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
