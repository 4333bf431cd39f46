"""What watches a training."""

from typing import Protocol

from manyclass.training.history import History, Progress, Record


class Callback(Protocol):
    """Told what happens. A class that derives from it may leave hooks out.

    After a step come its record, if one is due, and then `on_step`. Callbacks are called in the order they were given
    in. One that raises KeyboardInterrupt ends the training as Ctrl-C does.
    """

    def on_step(self, progress: Progress) -> None:
        """After each step: the place to save a checkpoint, or to refresh a sampler."""
        return

    def on_record(self, record: Record) -> None:
        """After each report, evaluation or probe."""
        return

    def on_end(self, history: History) -> None:
        """Once, however the training ended: the place to close what is open."""
        return
