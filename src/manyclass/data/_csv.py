"""CSV and TSV as columns of text."""

import csv
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from manyclass.data._cells import TableCells
from manyclass.data.files import blocks, one_line
from manyclass.errors import UserError

_MAX_BATCH_ROWS = 4096
_BATCH_CHARACTERS = 1 << 24  # a batch ends with the row that exceeds it
_BATCH_CELLS = 1 << 22  # likewise: an empty cell takes memory too
_MAX_CELL_CHARACTERS = 1 << 24  # so that a quote that is never closed does not fill the memory


class CsvTable:
    """A table of text with a header line; quoted cells may hold line ends.

    Args:
        path: the file; .gz, .xz and .bz2 are decompressed.
        delimiter: character between cells.
        name: the user's name for the file, for errors.

    Raises:
        UserError: the file or its header cannot be read, or it is empty. `cells` raises it for a row with another
            number of cells than the header, and for malformed quotes.
    """

    unit = "line"

    def __init__(self, path: Path, *, delimiter: str, name: str) -> None:
        self.path, self._delimiter, self._name = path, delimiter, name
        records = self._records()
        first = next(records, None)
        records.close()
        if first is None:
            raise UserError(f"`{name}` must have a header line and rows, got nothing in {path}")
        self.columns = tuple(cell.strip() for cell in first[1])
        self.types: dict[str, str] = {}

    def cells(self, columns: Sequence[str], *, label: str | None = None) -> Iterator[TableCells]:
        """Yield all rows, a few thousand at a time; see `TableFile`."""
        places: list[int] = []
        rows: list[list[str]] = []
        size, done = 0, 0
        wanted = {*columns, label}
        fault: UserError | None = None
        most_rows = min(_MAX_BATCH_ROWS, 1 + _BATCH_CELLS // len(self.columns))
        records = self._rows()
        while True:
            try:
                record = next(records, None)
            except UserError as error:
                record, fault = None, error
            if record is None:
                break
            place, row, done = record
            places.append(place)
            rows.append(row)
            size += sum(map(len, row))
            if len(rows) == most_rows or size > _BATCH_CHARACTERS:
                yield self._cells(places, rows, done, wanted)
                places, rows, size = [], [], 0
        if rows:
            yield self._cells(places, rows, done, wanted)
        if fault is not None:
            raise fault

    def _rows(self) -> Iterator[tuple[int, list[str], int]]:
        """Yield the records after the header, as `_records` does, each with as many cells."""
        records = self._records()
        next(records, None)
        for place, row, done in records:
            if len(row) != len(self.columns):
                wanted = f"{len(self.columns)} cells, as its header has"
                self._fail(f"must have {wanted}, got {len(row)}", place)
            yield place, row, done

    def _cells(self, places: list[int], rows: list[list[str]], done: int, wanted: set[str | None]) -> TableCells:
        columns = zip(self.columns, zip(*rows, strict=True), strict=True)
        return TableCells(places, {name: list(cells) for name, cells in columns if name in wanted}, done)

    def _records(self) -> Generator[tuple[int, list[str], int]]:
        """Yield the first line of each record, its cells, and the bytes read so far; blank lines are skipped."""
        done = 0

        def feed() -> Iterator[str]:
            nonlocal done
            for block in blocks(self.path, name=self._name):
                done = block.done
                yield from (line + "\n" for line in block.data.decode().split("\n")[:-1])

        reader = csv.reader(feed(), delimiter=self._delimiter, strict=True)
        while True:
            place = reader.line_num + 1
            # The limit is global to the process, so it is restored after each record.
            limit = csv.field_size_limit(_MAX_CELL_CHARACTERS)
            try:
                row = next(reader, None)
            except csv.Error as error:
                self._fail(f"must be CSV, got a malformed record ({one_line(error)})", place)
            finally:
                csv.field_size_limit(limit)
            if row is None:
                return
            if row:
                yield place, row, done

    def _fail(self, fault: str, place: int) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in line {place} of {self.path}")
