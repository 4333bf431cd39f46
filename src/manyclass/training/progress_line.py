"""Progress on a terminal or in a file."""

import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

from manyclass import _check
from manyclass.training.callback import Callback
from manyclass.training.history import History, Record

if TYPE_CHECKING:
    from manyclass.training.loop import Training


CLEARED_LINE = "\r\x1b[K"


class ProgressLine(Callback):
    """A callback that prints progress with the last held-out loss and error of log Z̃.

    On a terminal one line is overwritten in place, and lines with an evaluation stay. In a file there is a line for
    each evaluation, and for other records if the last line is older than `every`.

    Args:
        file: to print to. None: the current standard error.
        every: seconds between lines without an evaluation, if the file is no terminal.
    """

    def __init__(self, *, file: TextIO | None = None, every: float = 10.0) -> None:
        self._given = file
        self._every = _check.number("every", every, low=0)
        self._shown_at = time.monotonic()
        self._open = False
        self._last_counted = (0, 0.0)
        self._examples_per_second = 0.0
        self._held_out: float | None = None
        self._rmse: float | None = None

    def on_record(self, training: "Training", record: Record) -> None:
        """Print or overwrite the line."""
        file, now = self._file(), time.monotonic()
        self._update(record)
        if record.decision is not None:
            file.write(f"{CLEARED_LINE if file.isatty() else ''}{record.decision}\n")
            self._open = False
        evaluated = record.held_out_loss is not None
        if file.isatty():
            # One column stays free, because some terminals wrap a full line.
            text = self._text(record)[: shutil.get_terminal_size().columns - 1]
            file.write(f"\r{text}\x1b[K" + "\n" * evaluated)
            self._open = not evaluated
        elif evaluated or now - self._shown_at >= self._every:
            file.write(self._text(record) + "\n")
        else:
            return
        file.flush()
        self._shown_at = now

    def on_end(self, training: "Training", history: History) -> None:
        """Print the reason for the end and the best evaluation."""
        by = "" if history.best_by == "loss" else f" {history.best_by}"
        best = "" if history.best_step is None else f", best{by} at step {history.best_step:,}"
        best += "" if history.best_loss is None else f": held-out loss {history.best_loss:.4f}"
        text = f"stopped ({history.stopped}) after {history.progress.step:,} steps{best}\n"
        file = self._file()
        file.write("\n" * self._open + text)
        file.flush()
        self._open = False

    def _file(self) -> TextIO:
        return sys.stderr if self._given is None else self._given

    def _update(self, record: Record) -> None:
        examples, seconds = record.examples - self._last_counted[0], record.seconds - self._last_counted[1]
        # The first record of a resumed training counts from the start of the training: the mean pace so far.
        if examples > 0 and seconds > 0:
            self._examples_per_second = examples / seconds
            self._last_counted = (record.examples, record.seconds)
        self._held_out = self._held_out if record.held_out_loss is None else record.held_out_loss
        self._rmse = self._rmse if record.rmse_log_z is None else record.rmse_log_z

    def _text(self, record: Record) -> str:
        parts = [f"step {record.step:,}", f"epoch {record.epoch}", f"{self._examples_per_second:,.0f} examples/s"]
        parts.append(f"loss {record.loss:.4f}")
        if self._held_out is not None:
            parts.append(f"held-out loss {self._held_out:.4f}")
        parts += [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        if self._rmse is not None:
            parts.append(f"error of log Z {self._rmse:.2g}")
        if record.seconds_left is not None:
            parts.append(f"{_format_seconds(record.seconds_left)} left")
        return "  ".join(parts)


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
