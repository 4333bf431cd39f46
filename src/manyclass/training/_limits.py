"""When a training ends."""

from dataclasses import dataclass

from manyclass import _check
from manyclass.training.history import Progress, Stopped


@dataclass(frozen=True)
class Limits:
    """The first to be reached ends the training; at least one is given."""

    epochs: int | None
    steps: int | None
    seconds: float | None

    def __post_init__(self) -> None:
        if self.epochs is self.steps is self.seconds is None:
            raise ValueError("`epochs`, `steps` or `seconds` must be given, got None for each")
        if self.epochs is not None:
            _check.whole("epochs", self.epochs, 1)
        if self.steps is not None:
            _check.whole("steps", self.steps, 1)
        if self.seconds is not None:
            _check.number("seconds", self.seconds, low=0, strict=True)

    def reached(self, at: Progress) -> Stopped | None:
        if self.epochs is not None and at.epoch >= self.epochs:
            return "epochs"
        if self.steps is not None and at.step >= self.steps:
            return "steps"
        if self.seconds is not None and at.seconds >= self.seconds:
            return "seconds"
        return None

    def seconds_left(self, at: Progress, batches_per_epoch: int | None) -> float | None:
        """Until the first limit, at the pace so far; None where that is unknown."""
        left = []
        pace = at.seconds / max(1, at.step)
        if self.seconds is not None:
            left.append(self.seconds - at.seconds)
        if self.steps is not None:
            left.append((self.steps - at.step) * pace)
        if self.epochs is not None and batches_per_epoch is not None:
            left.append(((self.epochs - at.epoch) * batches_per_epoch - at.position) * pace)
        return max(0.0, min(left)) if left else None
