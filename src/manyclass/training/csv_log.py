"""Records as rows of a file."""

import contextlib
import csv
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from manyclass.errors import NotSavedWarning
from manyclass.training.callback import Callback
from manyclass.training.history import History, Record

_COLUMNS = ("step", "epoch", "examples", "seconds", "loss", "held_out_loss", "rmse_log_z")


class CSVLog(Callback):
    """Appends a row for each record, on disk as soon as it is written; what was not measured is left empty.

    A training that is resumed from some time ago takes steps again: their rows give way to the new ones. Where a row
    cannot be written, as on a full disk, that is a warning, and it follows with the next one that can.

    Args:
        path: the file; it is opened when the first record comes. One that exists goes on below its last row.
        metrics: the names of the metrics that get a column.

    Raises:
        ValueError: with the first record, or `check`: the file has other columns, or is no text.
    """

    def __init__(self, path: Path | str, *, metrics: Sequence[str] = ()) -> None:
        self._path = Path(path)
        self._metrics = tuple(metrics)
        self._file: TextIO | None = None
        self._owed: list[list[object]] = []
        self._warned = False

    def check(self) -> None:
        """Raise if rows cannot go on below those that the file has."""
        self._rows()

    def on_record(self, record: Record) -> None:
        values = [getattr(record, name) for name in _COLUMNS] + [record.metrics.get(name) for name in self._metrics]
        self._owed.append(values)
        try:
            if self._file is None:
                self._file = self._open(int(self._owed[0][0]))  # type: ignore[call-overload]
            csv.writer(self._file, lineterminator="\n").writerows(self._owed)
            self._file.flush()
        except OSError as error:
            self._close()
            if not self._warned:
                reason = error.strerror or error
                warnings.warn(f"cannot write {self._path}: {reason}. Rows follow later", NotSavedWarning, stacklevel=2)
            self._warned = True
        else:
            self._owed, self._warned = [], False

    def on_end(self, history: History) -> None:
        self._close()

    def _close(self) -> None:
        # What a full disk did not take, it does not take now.
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _open(self, step: int) -> TextIO:
        # A row without its end is of a writer that was killed.
        kept = [row for row in self._rows() if row.endswith("\n") and _step(row) < step]
        beside = self._path.with_name(f"{self._path.name}.tmp")
        try:
            with beside.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([*_COLUMNS, *self._metrics])
                file.writelines(kept)
            beside.replace(self._path)
        finally:
            beside.unlink(missing_ok=True)
        return self._path.open("a", encoding="utf-8", newline="")

    def _rows(self) -> list[str]:
        """What stands below the header."""
        columns = [*_COLUMNS, *self._metrics]
        try:
            written = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        except UnicodeDecodeError:
            raise ValueError(f"`path` must be text, got other bytes in {self._path}") from None
        first = next(csv.reader(written.splitlines()[:1]), None)
        if first is not None and first != columns:
            raise ValueError(f"`path` must have the columns {columns}, got {first} in {self._path}")
        return written.splitlines(keepends=True)[1:]


def _step(row: str) -> float:
    number = row.split(",", 1)[0]
    return int(number) if number.isdecimal() else math.inf
