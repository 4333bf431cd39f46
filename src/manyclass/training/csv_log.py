"""A log of records as a CSV file."""

import contextlib
import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from manyclass import storage
from manyclass.errors import NotSavedWarning, UserError, notify
from manyclass.training.callback import Callback
from manyclass.training.history import History, Record

if TYPE_CHECKING:
    from manyclass.training.loop import Training

_COLUMNS = ("step", "epoch", "examples", "seconds", "loss", "held_out_loss", "rmse_log_z", "decision")
_MAX_BYTES = 1 << 28  # a row has about 100


class CSVLog(Callback):
    """A callback that appends a row for each record and flushes it; values not measured are left empty.

    A training resumed from an older checkpoint repeats steps: their rows are replaced. If a row cannot be written, as
    on a full disk, there is a warning, and the row is written together with the next one that can be.

    Args:
        path: the file, opened at the first record. Rows are appended if it exists.
        metrics: names of the metrics that get a column.

    Raises:
        UserError: the file is a device or a pipe, or too large; raised by `check`.
        ValueError: the file has other columns or is not text; raised by `check` or at the first record.
    """

    def __init__(self, path: Path | str, *, metrics: Sequence[str] = ()) -> None:
        self._path = Path(path)
        self._metrics = tuple(metrics)
        self._file: TextIO | None = None
        self._unwritten: list[list[object]] = []
        self._warned = False

    def check(self) -> None:
        """Raise if rows cannot be appended to the file."""
        self._rows()

    def on_record(self, training: "Training", record: Record) -> None:
        """Write a row."""
        values = [getattr(record, name) for name in _COLUMNS] + [record.metrics.get(name) for name in self._metrics]
        self._unwritten.append(values)
        try:
            if self._file is None:
                self._file = self._open(int(self._unwritten[0][0]))  # type: ignore[call-overload]
            csv.writer(self._file, lineterminator="\n").writerows(self._unwritten)
            self._file.flush()
        except (OSError, UserError) as error:
            self._close()
            if not self._warned:
                reason = error.strerror if isinstance(error, OSError) else error
                notify(f"cannot write {self._path}: {reason}. Rows follow later", NotSavedWarning)
            self._warned = True
        else:
            self._unwritten, self._warned = [], False

    def on_end(self, training: "Training", history: History) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        # Closing flushes, which fails on a full disk as writing did.
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _open(self, step: int) -> TextIO:
        # A row without a line end comes from a writer that was killed.
        kept = [row for row in self._rows() if row.endswith("\n") and _step(row) < step]
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow([*_COLUMNS, *self._metrics])
        with storage.atomic_write(self._path) as temporary:
            temporary.write_bytes("".join([header.getvalue(), *kept]).encode())
        return self._path.open("a", encoding="utf-8", newline="")

    def _rows(self) -> list[str]:
        """Return the rows below the header."""
        columns = [*_COLUMNS, *self._metrics]
        try:
            written = storage.read_text(self._path, max_bytes=_MAX_BYTES) if self._path.exists() else ""
        except UnicodeDecodeError:
            raise ValueError(f"`path` must be text, got other bytes in {self._path}") from None
        first = next(csv.reader(written.splitlines()[:1]), None)
        if first is not None and first != columns:
            raise ValueError(f"`path` must have the columns {columns}, got {first} in {self._path}")
        return written.splitlines(keepends=True)[1:]


def _step(row: str) -> float:
    number = row.split(",", 1)[0]
    return int(number) if number.isdecimal() else math.inf
