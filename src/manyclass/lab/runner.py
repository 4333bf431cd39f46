"""Runs the cells of one experiment after the other and reports progress."""

from collections.abc import Callable, Sequence
from typing import Any

from manyclass.lab.cells import Cells, Compute, Settings

# Receives an experiment's name, and its numbers of finished and of all cells.
OnProgress = Callable[[str, int, int], None]


class CellRunner:
    """Runner of cells that counts them per experiment.

    Args:
        cells: the cache that computes them.
        on_progress: callback after each cell, or None.
    """

    def __init__(self, cells: Cells, on_progress: OnProgress | None = None) -> None:
        self._cells, self._on_progress = cells, on_progress
        self.start("")

    def start(self, name: str) -> None:
        """Begin counting for another experiment."""
        self._name, self._done, self._total = name, 0, 0

    def map(
        self, compute: Compute, settings: Sequence[Settings], *, unkeyed: Settings | None = None
    ) -> list[dict[str, Any]]:
        """Return the function's results in the order of the settings; see `Cells.map` for `unkeyed`."""
        before = self._done
        self._total += len(settings)

        def on_done(number: int) -> None:
            self._done = before + number
            if self._on_progress is not None:
                self._on_progress(self._name, self._done, self._total)

        return self._cells.map(compute, settings, unkeyed=unkeyed, on_done=on_done)
