"""Records as rows of a file."""

import contextlib
import csv
import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from manyclass import storage
from manyclass.errors import NotSavedWarning, UserError
from manyclass.training.callback import Callback
from manyclass.training.history import History, Record

if TYPE_CHECKING:
    from manyclass.training.loop import Training

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

    def on_record(self, training: "Training", record: Record) -> None:
        values = [getattr(record, name) for name in _COLUMNS] + [record.metrics.get(name) for name in self._metrics]
        self._owed.append(values)
        try:
            if self._file is None:
                self._file = self._open(int(self._owed[0][0]))  # type: ignore[call-overload]
            csv.writer(self._file, lineterminator="\n").writerows(self._owed)
            self._file.flush()
        except (OSError, UserError) as error:
            self._close()
            if not self._warned:
                reason = error.strerror if isinstance(error, OSError) else error
                warnings.warn(f"cannot write {self._path}: {reason}. Rows follow later", NotSavedWarning, stacklevel=2)
            self._warned = True
        else:
            self._owed, self._warned = [], False

    def on_end(self, training: "Training", history: History) -> None:
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
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow([*_COLUMNS, *self._metrics])
        with storage.atomic_write(self._path) as temporary:
            temporary.write_bytes("".join([header.getvalue(), *kept]).encode())
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
