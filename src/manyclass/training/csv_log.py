"""Records as rows of a file."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from manyclass.training.callback import Callback
from manyclass.training.history import History, Record

_COLUMNS = ("step", "epoch", "examples", "seconds", "loss", "held_out_loss", "rmse_log_z")


class CSVLog(Callback):
    """Appends a row for each record, on disk as soon as it is written; what was not measured is left empty.

    A training that is resumed from some time ago takes steps again: their rows give way to the new ones.

    Args:
        path: the file; it is opened when the first record comes. One that exists goes on below its last row.
        metrics: the names of the metrics that get a column.

    Raises:
        ValueError: with the first record: the file has other columns.
    """

    def __init__(self, path: Path | str, *, metrics: Sequence[str] = ()) -> None:
        self._path = Path(path)
        self._metrics = tuple(metrics)
        self._file: TextIO | None = None

    def on_record(self, record: Record) -> None:
        if self._file is None:
            self._file = self._open(record.step)
        values = [getattr(record, name) for name in _COLUMNS] + [record.metrics.get(name) for name in self._metrics]
        csv.writer(self._file, lineterminator="\n").writerow(values)
        self._file.flush()

    def on_end(self, history: History) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> TextIO:
        columns = [*_COLUMNS, *self._metrics]
        written = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        first = next(csv.reader(written.splitlines()[:1]), None)
        if first is not None and first != columns:
            raise ValueError(f"`path` must have the columns {columns}, got {first} in {self._path}")
        # A row without its end is of a writer that was killed.
        rows = written.splitlines(keepends=True)[1:]
        kept = [row for row in rows if row.endswith("\n") and _step(row) < step]
        beside = self._path.with_name(f"{self._path.name}.tmp")
        with beside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(columns)
            file.writelines(kept)
        beside.replace(self._path)
        return self._path.open("a", encoding="utf-8", newline="")


def _step(row: str) -> float:
    number = row.split(",", 1)[0]
    return int(number) if number.isdecimal() else math.inf
