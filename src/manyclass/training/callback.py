"""Callbacks of a training."""

from typing import TYPE_CHECKING, Protocol

from manyclass.training.history import History, Record

if TYPE_CHECKING:
    from manyclass.training.loop import Training


class Callback(Protocol):
    """Hooks that a training calls with itself; a class that derives from it may leave some out.

    After a step comes its record, if one is due, and then `on_step`. Callbacks are called in the order given. One
    that raises KeyboardInterrupt ends the training as Ctrl-C does.
    """

    def on_step(self, training: "Training") -> None:
        """Run after each step: the place to save a checkpoint or to refresh a sampler."""
        return

    def on_record(self, training: "Training", record: Record) -> None:
        """Run after each report, evaluation or probe."""
        return

    def on_end(self, training: "Training", history: History) -> None:
        """Run once at the end, also after a failure: the place to close files."""
        return
