"""Progress on the standard error."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from manyclass.lab.runner import OnProgress


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Yield a callback that shows a bar per experiment on a terminal, elsewhere a line every ten seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield show


def reading() -> Callable[[int, int], None]:
    """Return a callback of bytes read that shows a line on a terminal if reading takes over a second."""
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - started > 1:
            end = "\r\x1b[K" if done >= total else ""
            print(f"\rreading {done / max(total, 1):4.0%}{end}", end="", file=sys.stderr, flush=True)

    return show


def evaluating(batches: Iterable[object]) -> Iterator[object]:
    """Yield batches and show their share so far: after a second on a terminal, elsewhere a line every ten seconds."""
    terminal, shown, last = sys.stderr.isatty(), False, time.monotonic()
    for done, batch in enumerate(batches):
        if isinstance(batches, Sized) and (time.monotonic() - last > (1 if terminal else 10)):
            begin, end = ("\r", "") if terminal else ("", "\n")
            print(f"{begin}evaluating {done / len(batches):4.0%}", end=end, file=sys.stderr, flush=True)
            last, shown = time.monotonic(), terminal
        yield batch
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Lines:
    def __init__(self) -> None:
        self._shown = (0.0, "")

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name != self._shown[1] or now - self._shown[0] >= 10:
            print(f"{name:12} {done} of {total}", file=sys.stderr, flush=True)
            self._shown = (now, name)
