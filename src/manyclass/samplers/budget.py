"""A number of drawn classes that keeps the error of log Z̃ at a chosen value."""

import logging
import math
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manyclass import _check, _ranks
from manyclass._plain_state import MAX_STEPS, load_state, move_state, save_state, saved_vector
from manyclass.candidates import Candidates
from manyclass.samplers._sampler import AdjustableSampler, Observation, checked_draw

log = logging.getLogger("manyclass")

MAX_KEPT_PROBES = 100
MEAN_OVER_PROBES = 8
MAX_RELATIVE_ERROR = 4.0  # in multiples of the chosen error
K_MULTIPLE = 8
MIN_STEPS_BETWEEN_PROBES = 100
NO_ERROR = -1.0


class Budget(nn.Module):
    """A sampler whose k grows or shrinks until the error of log Z̃ has the chosen value.

    Every few training steps the head measures the root-mean-square error of log Z̃ on a few examples, from the spread of
    a few more draws. The error falls about as 1/√k, so the wanted k is the running mean of error²·k divided by the
    square of the chosen error. A probe changes k by at most a factor of 2, and not at all for less than 10 %. Each
    change is logged. k does not change with an objective that has no Z̃.

    Args:
        sampler: a sampler whose k can be changed; it starts at that k.
        rmse_log_z: the chosen error.
        least, most: the bounds of k. Default of `most`: C.
        every: training steps between two probes. Default: the larger of 100 and √C.

    Raises:
        TypeError: `sampler` has no `set_k`.
        ValueError: the k of `sampler` is fixed, or a number is out of range.

    Example:
        >>> from manyclass import ClassHead
        >>> from manyclass.samplers import Systematic
        >>> head = ClassHead(8, 5000, sampler=Budget(Systematic(torch.ones(5000), k=1024), 0.05, every=1))
        >>> for _ in range(5):
        ...     head(torch.randn(16, 8), torch.arange(16)).backward()
        >>> head.sampler.k < 1024, len(head.sampler.probes)
        (True, 4)
    """

    learns = True
    saved = ("progress",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        sampler: AdjustableSampler,
        rmse_log_z: float,
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
        self._every = None if every is None else _check.integer("every", every, 1)
        self._steps = 0
        self._probed = 0
        self._mean = 0.0
        # The error of the last probe until the next step, which begins with the new k; -1: none.
        self._error = NO_ERROR
        self._probes: deque[tuple[int, float, int]] = deque(maxlen=MAX_KEPT_PROBES)

    @property
    def k(self) -> int:
        """The present number of classes drawn."""
        assert self.sampler.k is not None
        return self.sampler.k

    @property
    def probes(self) -> list[tuple[int, float, int]]:
        """The last probes: step, measured error, and the k chosen."""
        return list(self._probes)

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

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Attach class vectors to the inner sampler."""
        self.sampler.attach(weight, bias)

    def advance(self) -> None:
        """Count a training step in the inner sampler, and adjust k to the last probe."""
        if self._error != NO_ERROR:
            self.adjust(self._error)
            self._error = NO_ERROR
        self.sampler.advance()

    def observe(self, observation: Observation) -> None:
        """Let the inner sampler learn, and measure the error of log Z̃ if that is due; the next step changes k."""
        self.sampler.observe(observation)
        self._steps += 1
        if self._steps % (self._every or max(MIN_STEPS_BETWEEN_PROBES, math.isqrt(self.num_classes))) == 0:
            device = observation.candidates.blocks[0].ids.device
            error = _ranks.mean_over_ranks(observation.rmse_log_z(self._steps), device)
            self._error = error if math.isfinite(error) else NO_ERROR

    def adjust(self, error: float) -> None:
        """Choose k from the root-mean-square error of log Z̃ at the present k; NaN changes nothing."""
        if not math.isfinite(error):
            return
        self._probed += 1
        # A huge error says that k is far too small, but not by how much: it is capped, so that its effect fades soon.
        counted = min(error, MAX_RELATIVE_ERROR * self.rmse_log_z)
        self._mean += (counted**2 * self.k - self._mean) / min(self._probed, MEAN_OVER_PROBES)
        before, after = self.k, self._choose(self._mean / self.rmse_log_z**2)
        if after != before:
            self.sampler.set_k(after)
            log.info(
                "k %d → %d: error of log Z̃ %.3g, wanted %.3g (step %d)",
                before,
                after,
                error,
                self.rmse_log_z,
                self._steps,
            )
        self._probes.append((self._steps, error, after))

    def _choose(self, wanted: float) -> int:
        most: int = min(self.num_classes, self.most or self.num_classes)
        least = min(self.least, most)
        factor = min(2.0, max(0.5, wanted / self.k))
        k = self.k if abs(factor - 1) <= 0.1 else K_MULTIPLE * round(factor * self.k / K_MULTIPLE)
        return min(most, max(least, k))

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
        """float64 [5]: k, the number of steps and probes, the running mean and the last error; deciding the next k."""
        values = [self.k, self._steps, self._probed, self._mean, self._error]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def move(self, device: torch.device) -> None:
        """Do nothing: there are no tensors."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved k, number of steps and running mean."""
        values = saved_vector("progress", state["progress"], torch.float64, 5, low=NO_ERROR).tolist()
        if not max(values) < MAX_STEPS or min(values[:4]) < 0:
            raise ValueError(f"`progress` must hold numbers from 0 to 2⁵³, got {values}")
        k = _check.integer("k", int(values[0]), 1, self.num_classes)
        # The state of the inner sampler, loaded next, belongs to this k.
        if k != self.k:
            self.sampler.set_k(k)
        self._steps, self._probed, self._mean, self._error = int(values[1]), int(values[2]), values[3], values[4]

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"rmse_log_z={self.rmse_log_z:g}, least={self.least}, most={self.most}"
