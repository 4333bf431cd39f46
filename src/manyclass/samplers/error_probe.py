"""The error of log Z̃ in training: when to measure it, and its root mean square over the last probes."""

import math
from collections import deque
from collections.abc import Sequence

from manyclass import _check
from manyclass._plain_state import MAX_STEPS

PROBE_EXAMPLES = 64  # of a step's batch, scored with all classes
POOLED_PROBES = 8
FIRST_STEP = 4  # the intervals double from there until a probe costs at most MAX_SHARE
MAX_SHARE = 0.01  # of the work of the steps between two probes
FIRST_INTERVALS = 0.1  # of such an interval come before the first probe
WARNED_ERROR = 0.5  # nats
MIN_WARNED_PROBES = 4  # a single probe has heavy tails
PRODUCTS_PER_STEP = 3  # of the examples with the classes scored: scores, and the gradients of both factors


class ErrorProbe:
    """A schedule of probes, and the mean squares of log Z̃ - log Z that the last of them found.

    A probe compares the step's own log Z̃ with the exact log Z, on a few examples of the batch: other examples each
    time. The error has heavy tails, so `error` pools several probes. The schedule follows from sizes and never from
    clocks, so that the same seed gives the same probes.

    Args:
        every: steps between two probes. None: the intervals double until probes cost at most 1 % of the steps. The
            first one of many classes comes when it costs at most a tenth of the steps so far.
        warns: whether a pooled error above 0.5 is to be warned about.

    Example:
        >>> probe = ErrorProbe(every=2)
        >>> for square in (0.04, 0.02):
        ...     due = [probe.count_step(), probe.count_step()]
        ...     probe.record(square, interval=1)
        >>> due, round(probe.error, 3)
        ([False, True], 0.173)
    """

    def __init__(self, *, every: int | None = None, warns: bool = True) -> None:
        self.every = None if every is None else _check.integer("every", every, 1)
        self.steps = 0
        self.next_step = every or FIRST_STEP
        self.number = 0
        self.warned = not warns
        self._squares: deque[float] = deque(maxlen=POOLED_PROBES)

    @property
    def error(self) -> float | None:
        """The root mean square of log Z̃ - log Z over the last probes; None before the first."""
        return self.recent_error(len(self._squares)) if self._squares else None

    def recent_error(self, probes: int) -> float | None:
        """Return the same over the last `probes` of the pool; None if it holds fewer."""
        if len(self._squares) < probes:
            return None
        # Divided before they are added: the sum of squares could overflow.
        return math.sqrt(math.fsum(square / probes for square in list(self._squares)[-probes:]))

    @property
    def pooled(self) -> int:
        """The number of probes that `error` pools."""
        return len(self._squares)

    def count_step(self) -> bool:
        """Count a training step; return True if a probe is due in it."""
        self.steps += 1
        return self.steps >= self.next_step

    def is_due(self, steps: int) -> bool:
        """Return True if a probe is due in one of the next training steps."""
        return self.steps + steps >= self.next_step

    def postpones(self, interval: int) -> bool:
        """Return True if the first probe would cost too much after so few steps, and schedule it for later.

        Args:
            interval: steps after which a probe costs at most 1 % of them.
        """
        later = math.ceil(FIRST_INTERVALS * interval)
        if self.every is not None or self.number > 0 or self.steps >= later:
            return False
        self.next_step = later
        return True

    def record(self, square: float, *, interval: int) -> None:
        """Add the mean square of a probe, and schedule the next one; a square that is not finite is not added.

        Args:
            square: mean of (log Z̃ - log Z)² over the examples of the probe.
            interval: steps after which another probe costs at most 1 % of them.
        """
        self.number += 1
        if math.isfinite(square):
            self._squares.append(square)
        self.next_step = self.steps + (self.every or max(1, min(interval, self.steps)))

    def restart_pool(self) -> None:
        """Forget the probes so far: they measured another design."""
        self._squares.clear()

    def should_warn(self) -> bool:
        """Return True once, when the pooled error is above 0.5."""
        error = self.error
        if self.warned or error is None or self.pooled < MIN_WARNED_PROBES or error <= WARNED_ERROR:
            return False
        self.warned = True
        return True

    def state(self) -> list[float]:
        """Return its state as numbers, always of the same length."""
        squares = [*self._squares, *[-1.0] * (POOLED_PROBES - len(self._squares))]
        return [float(self.steps), float(self.next_step), float(self.number), float(self.warned), *squares]

    def load_state(self, state: Sequence[float]) -> None:
        """Continue from `state()` of another probe.

        Raises:
            ValueError: a number is missing, negative or not finite, or the next probe lies in the past.
        """
        if len(state) != STATE_LENGTH:
            raise ValueError(f"`state` must hold {STATE_LENGTH} numbers, got {len(state)}")
        steps, next_step, number, warned, *squares = state
        if not all(0 <= value < MAX_STEPS for value in (steps, next_step, number, warned)) or next_step < steps:
            raise ValueError(f"`state` must hold steps from 0 to 2⁵³, the next probe not before, got {list(state[:4])}")
        if not all(value == -1 or 0 <= value < math.inf for value in squares):
            raise ValueError(f"`state` must hold squares that are finite and not negative, or -1, got {squares}")
        self.steps, self.next_step, self.number, self.warned = int(steps), int(next_step), int(number), bool(warned)
        self._squares = deque((value for value in squares if value >= 0), maxlen=POOLED_PROBES)


STATE_LENGTH = 4 + POOLED_PROBES


def affordable_interval(num_classes: int, batch: int, scored: float) -> int:
    """Return the steps after which a probe costs at most 1 % of them, counted in products of examples and classes.

    Args:
        num_classes: C, the classes that a probe scores for each of its examples.
        batch: examples of a step.
        scored: classes that a step scores for an example.
    """
    return math.ceil(PROBE_EXAMPLES * num_classes / (MAX_SHARE * PRODUCTS_PER_STEP * batch * scored))
