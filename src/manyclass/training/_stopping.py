"""The end of a training: limits, the best evaluation, the stopwatch, and Ctrl-C."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.training.history import Progress, Stopped

DOUBLE_PRESS_SECONDS = 1.0


@dataclass(frozen=True)
class Limits:
    """The limits of a training, at least one; the first one reached ends it."""

    epochs: int | None
    steps: int | None
    seconds: float | None

    def __post_init__(self) -> None:
        if self.epochs is self.steps is self.seconds is None:
            raise ValueError("`epochs`, `steps` or `seconds` must be given, got None for each")
        for name, limit in (("epochs", self.epochs), ("steps", self.steps)):
            if limit is not None:
                _check.integer(name, limit, 1)
        if self.seconds is not None:
            _check.number("seconds", self.seconds, low=0, strict=True)

    def reached(self, at: Progress) -> Stopped | None:
        """Return the limit that is reached, or None."""
        if self.epochs is not None and at.epoch >= self.epochs:
            return "epochs"
        if self.steps is not None and at.step >= self.steps:
            return "steps"
        if self.seconds is not None and at.seconds >= self.seconds:
            return "seconds"
        return None

    def seconds_left(self, at: Progress, batches_per_epoch: int | None) -> float | None:
        """Estimate the seconds until the first limit at the pace so far; None if that is unknown."""
        left = []
        pace = at.seconds / max(1, at.step)
        if self.seconds is not None:
            left.append(self.seconds - at.seconds)
        if self.steps is not None:
            left.append((self.steps - at.step) * pace)
        if self.epochs is not None and batches_per_epoch is not None:
            left.append(((self.epochs - at.epoch) * batches_per_epoch - at.position) * pace)
        return max(0.0, min(left)) if left else None


class Best:
    """The best evaluation so far and, if modules are given, a copy of their tensors at that time.

    Args:
        modules: modules whose tensors to copy; None: copy nothing.
    """

    def __init__(self, modules: nn.Module | None) -> None:
        self._modules = modules
        self._tensors: dict[str, Tensor] | None = None
        self.loss = self.cost = math.inf
        self.step: int | None = None
        self.waited = 0

    def update(self, cost: float, loss: float, step: int) -> None:
        """Take in an evaluation: the new best if its cost is lower, else one more without improvement."""
        self.waited += 1
        if cost < self.cost:
            self.cost, self.loss, self.step, self.waited = cost, loss, step, 0
            self._tensors = None if self._modules is None else _copies(self._modules)

    def restore(self) -> None:
        """Load the copied tensors back into the modules, if there are any."""
        if self._modules is not None and self._tensors is not None:
            # Extra state is no tensor and was not copied, so loading cannot be strict.
            self._modules.load_state_dict(self._tensors, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs."""
        return {**{name: getattr(self, name) for name in ("cost", "loss", "step", "waited")}, "tensors": self._tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of another `Best`."""
        self.cost, self.loss, self.step, self.waited = (state[name] for name in ("cost", "loss", "step", "waited"))
        self._tensors = state["tensors"]


@torch.no_grad()
def _copies(modules: nn.Module) -> dict[str, Tensor]:
    """Copy all tensors of the state dict; a tensor that several names share is copied once."""
    own = {name: value for name, value in modules.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    copies = {id(value): value.detach().clone() for value in {id(value): value for value in own.values()}.values()}
    return {name: copies[id(value)] for name, value in own.items()}


class Stopwatch:
    """Seconds by the phase of a step that they were spent on.

    Args:
        seconds: those of earlier runs.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self._since = time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase."""
        return dict(self._seconds)

    def restart(self) -> None:
        """Forget the time since the last lap."""
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now


@contextlib.contextmanager
def defer_interrupts() -> Iterator[Callable[[], bool]]:
    """Defer the first Ctrl-C; yield a function that returns whether it was pressed.

    Half a step or half a checkpoint cannot be resumed, so the first Ctrl-C waits. A second one raises
    KeyboardInterrupt at once if it comes more than a second later; within a second it is a double press. SIGTERM is
    deferred in the same way if it raises KeyboardInterrupt, even where SIGINT is ignored, as in a script's background.
    Nothing is changed outside the main thread, or for a signal with another handler.
    """
    pressed: float | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        now = time.monotonic()
        if pressed is not None and now - pressed > DOUBLE_PRESS_SECONDS:
            raise KeyboardInterrupt
        pressed = now if pressed is None else pressed

    main = threading.current_thread() is threading.main_thread()
    handler = signal.default_int_handler
    deferred = [n for n in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(n) is handler]
    for number in deferred:
        signal.signal(number, note)
    try:
        yield lambda: pressed is not None
    finally:
        for number in deferred:
            signal.signal(number, handler)
