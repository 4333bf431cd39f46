"""Cells that are computed one experiment after the other, and who is told how far they are."""

from collections.abc import Sequence
from typing import Any, Protocol

from manyclass.lab.cells import Cells, Compute, Settings


class Watch(Protocol):
    """Is told how far an experiment is."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


class Work:
    """Counts the cells of the experiment under way.

    Args:
        cells: what computes.
        watch: is told of progress.
    """

    def __init__(self, cells: Cells, watch: Watch | None = None) -> None:
        self._cells, self._watch = cells, watch
        self.begin("")

    def begin(self, name: str) -> None:
        """Another experiment."""
        self._name, self._done, self._total = name, 0, 0

    def map(
        self, compute: Compute, settings: Sequence[Settings], *, given: Settings | None = None
    ) -> list[dict[str, Any]]:
        """The results of a function for each of some settings, in order; `given` as `Cells.map` has it."""
        before = self._done
        self._total += len(settings)

        def on_done(number: int) -> None:
            self._done = before + number
            if self._watch is not None:
                self._watch(self._name, self._done, self._total)

        return self._cells.map(compute, settings, given=given, on_done=on_done)
