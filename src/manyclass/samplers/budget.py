"""A number of drawn classes that keeps the error of log Z̃ near a chosen value."""

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manyclass import _check, defaults
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass._shard import Shard
from manyclass.candidates import Candidates
from manyclass.samplers._sampler import AdjustableSampler, Observation, StepClock, checked_draw, divide, replayable
from manyclass.samplers.error_probe import POOLED_PROBES, STATE_LENGTH, ErrorProbe

log = logging.getLogger("manyclass")

TOO_HIGH, TOO_LOW = 4 / 3, 7 / 15  # multiples of the chosen error: 0.2 and 0.07 for 0.15


class Budget(nn.Module):
    """A sampler whose k doubles when the error of log Z̃ is too high, and halves when it is needlessly low.

    The error is the root mean square over eight probes of training steps, see `ErrorProbe`. k doubles above 4/3 of the
    chosen error and halves below 7/15 of it; then eight other probes are awaited. k does not change with an objective
    that has no Z̃.

    Args:
        sampler: a sampler whose k can be changed; it starts at that k.
        rmse_log_z: the chosen error, 0.15 by default.
        least, most: the bounds of k. Default of `most`: C.
        every: training steps between two probes. Default: as few as cost 1 % of the time.

    Raises:
        TypeError: `sampler` has no `set_k`.
        ValueError: the k of `sampler` is fixed, or a number is out of range.

    Example:
        >>> from manyclass import ClassHead
        >>> from manyclass.samplers import Systematic
        >>> head = ClassHead(8, 5000, sampler=Budget(Systematic(torch.ones(5000), k=1024), 0.1, every=1))
        >>> for _ in range(9):
        ...     head(torch.randn(16, 8), torch.arange(16)).backward()
        >>> head.sampler.k, len(head.sampler.decisions)
        (512, 1)
    """

    learns = True
    saved = ("progress",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        sampler: AdjustableSampler,
        rmse_log_z: float = defaults.RMSE_LOG_Z,
        *,
        least: int = 64,
        most: int | None = None,
        every: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, AdjustableSampler):
            raise TypeError(f"`sampler` must be one whose k can be set, got {type(sampler).__name__}")
        if sampler.k is None:
            raise ValueError(f"`sampler` must have a `k` to change, got a {type(sampler).__name__} whose k is fixed")
        self.sampler = sampler
        self.rmse_log_z = _check.number("rmse_log_z", rmse_log_z, low=0, strict=True)
        self.least = _check.integer("least", least, 1)
        self.most = None if most is None else _check.integer("most", most, least)
        self.probe = ErrorProbe(every=every)
        self.decisions: list[str] = []

    @property
    def k(self) -> int:
        """The present number of classes drawn."""
        assert self.sampler.k is not None
        return self.sampler.k

    num_classes = property(lambda self: self.sampler.num_classes)
    device = property(lambda self: self.sampler.device)
    unbiased = property(lambda self: self.sampler.unbiased)
    renormalises = property(lambda self: self.sampler.renormalises)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        return self.sampler.draw(target, exclude, hidden=hidden, generator=generator)

    def divide(self, shard: Shard) -> None:
        """Divide the classes of the inner sampler; all processes measure the same errors."""
        divide(self.sampler, shard)

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Attach class vectors to the inner sampler."""
        self.sampler.attach(weight, bias)

    def advance(self) -> None:
        """Change k if the pooled error calls for it, and count a training step in the inner sampler."""
        if self.probe.pooled == POOLED_PROBES:
            self._adjust()
        self.sampler.advance()

    def begin(self, clock: StepClock) -> None:
        """Do nothing: it decides by the error alone."""

    def observe(self, observation: Observation) -> None:
        """Let the inner sampler learn; the head has recorded the error in `probe`."""
        if self.sampler.learns:
            self.sampler.observe(observation)

    def _adjust(self) -> None:
        error = self.probe.error
        assert error is not None
        factor = 2.0 if error > TOO_HIGH * self.rmse_log_z else 0.5 if error < TOO_LOW * self.rmse_log_z else 1.0
        most: int = min(self.num_classes, self.most or self.num_classes)
        before, after = self.k, min(most, max(min(self.least, most), int(factor * self.k)))
        if after == before:
            return
        self.sampler.set_k(after)
        self.decisions.append(
            f"step {self.probe.steps:,}: the error of log Z̃ is {error:.2g} with k = {before:,}, wanted "
            f"{self.rmse_log_z:g}; now k = {after:,}"
        )
        log.info(self.decisions[-1])
        self.probe.restart_pool()

    def is_settled(self, draws: int) -> bool:
        """Return True if the inner sampler is settled: this one decides in the first advance after a probe."""
        return replayable(self.sampler).is_settled(draws)

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return what the inner sampler pins."""
        return replayable(self.sampler).pinned(compiled=compiled)

    def refresh(self) -> None:
        """Rebuild the inner sampler from its counts."""
        self.sampler.refresh()

    def resize(self, num_classes: int) -> None:
        """Resize the counts, and lower k if fewer classes are left; an error leaves k unchanged."""
        before = self.k
        if before > num_classes:
            self.sampler.set_k(_check.integer("num_classes", num_classes, 1))
        try:
            self.sampler.resize(num_classes)
        except ValueError:
            self.sampler.set_k(before)
            raise

    @property
    def progress(self) -> Tensor:
        """float64: k, then the state of the probe."""
        return torch.tensor([self.k, *self.probe.state()], dtype=torch.float64, device="cpu")

    def move(self, device: torch.device) -> None:
        """Do nothing: there are no tensors."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved k and the probes so far."""
        values = saved_vector("progress", state["progress"], torch.float64, 1 + STATE_LENGTH, low=-1.0).tolist()
        if not values[0] < math.inf:
            raise ValueError(f"`k` must be finite, got {values[0]}")
        k = _check.integer("k", int(values[0]), 1, self.num_classes)
        self.probe.load_state(values[1:])
        # The state of the inner sampler, loaded next, belongs to this k.
        if k != self.k:
            self.sampler.set_k(k)

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"rmse_log_z={self.rmse_log_z:g}, least={self.least}, most={self.most}"
