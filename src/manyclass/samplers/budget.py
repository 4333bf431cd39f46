"""As many classes as the error of log Z̃ that is wanted takes."""

import logging
import math
from collections import deque

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.samplers._sampler import AdjustableSampler, FollowingSampler, checked_draw

log = logging.getLogger("manyclass")

_REMEMBERED = 100
_MEMORY = 8
_MOST_COUNTED = 4.0
_MULTIPLE = 8


class Budget(nn.Module):
    """A sampler whose k grows or shrinks until the error of log Z̃ is the one that is wanted.

    Every so many training steps a head measures the root-mean-square error of log Z̃ on a few examples, by how far a
    few more draws differ. The error falls about as 1/√k, so the running mean of error²·k, divided by the square of
    what is wanted, is the k to have. A probe changes it by no more than a factor of 2, and not at all for less than
    10 %. Each change is a line in the log. Objectives without a Z̃ leave k as it is, and so does a compiled head.

    Args:
        sampler: any that has a `set_k`; its k is where to begin.
        rmse_log_z: the error that is wanted.
        least, most: the bounds of k. No `most`: C.
        every: training steps between two probes. Default: 100, or √C where that is more.

    Raises:
        TypeError: a sampler whose k cannot be changed.
        ValueError: one that has no k; numbers out of range.

    Example:
        >>> from manyclass import ClassHead
        >>> from manyclass.samplers import Systematic
        >>> head = ClassHead(8, 5000, sampler=Budget(Systematic(torch.ones(5000), k=1024), 0.05, every=1))
        >>> for _ in range(5):
        ...     head(torch.randn(16, 8), torch.arange(16)).backward()
        >>> head.sampler.k < 1024, len(head.sampler.probes)
        (True, 5)
    """

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
            raise ValueError("`sampler` must have a `k` to change, got one built from probabilities")
        self.sampler = sampler
        self.rmse_log_z = _check.number("rmse_log_z", rmse_log_z, low=0, strict=True)
        self.least = _check.whole("least", least, 1)
        self.most = None if most is None else _check.whole("most", most, least)
        self._every = None if every is None else _check.whole("every", every, 1)
        self._steps = 0
        self._probed = 0
        self._mean = 0.0
        self._probes: deque[tuple[int, float, int]] = deque(maxlen=_REMEMBERED)

    @property
    def k(self) -> int:
        """How many classes are drawn now."""
        assert self.sampler.k is not None
        return self.sampler.k

    @property
    def probes(self) -> list[tuple[int, float, int]]:
        """The last probes: the step, the error found, and the k chosen."""
        return list(self._probes)

    @property
    def num_classes(self) -> int:
        return self.sampler.num_classes

    @property
    def device(self) -> torch.device | None:
        return self.sampler.device

    @property
    def unbiased(self) -> bool:
        return self.sampler.unbiased

    @property
    def renormalises(self) -> bool:
        return self.sampler.renormalises

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """As a call, for arguments that have been checked."""
        return self.sampler.draw(target, exclude, hidden=hidden, generator=generator)

    def follow(self, vectors: Tensor, bias: Tensor | None = None) -> None:
        """Show the sampler class vectors, if it looks at them."""
        if isinstance(self.sampler, FollowingSampler):
            self.sampler.follow(vectors, bias)

    def due(self) -> bool:
        """Whether the error is wanted in this training step, which is counted."""
        self._steps += 1
        return self._steps % (self._every or max(100, math.isqrt(self.num_classes))) == 0

    def take_error(self, error: float) -> None:
        """Choose k by the root-mean-square error of log Z̃ at the present one."""
        if not math.isfinite(error):
            return
        self._probed += 1
        # An error beyond all proportion says that k is far too small, but not how far, and must be forgotten soon.
        counted = min(error, _MOST_COUNTED * self.rmse_log_z)
        self._mean += (counted**2 * self.k - self._mean) / min(self._probed, _MEMORY)
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
        most = min(self.num_classes, self.most or self.num_classes)
        least = min(self.least, most)
        factor = min(2.0, max(0.5, wanted / self.k))
        k = self.k if abs(factor - 1) <= 0.1 else _MULTIPLE * round(factor * self.k / _MULTIPLE)
        return min(most, max(least, k))

    def refresh(self) -> None:
        """Rebuild the sampler from its counts."""
        self.sampler.refresh()

    def resize(self, num_classes: int) -> None:
        """Follow the counts to another number of classes, with fewer drawn where there are fewer."""
        if self.k > num_classes:
            self.sampler.set_k(_check.whole("num_classes", num_classes, 1))
        self.sampler.resize(num_classes)

    def get_extra_state(self) -> Tensor:
        """k, the steps and probes so far, and the running mean: what is chosen next follows from them."""
        return torch.tensor([self.k, self._steps, self._probed, self._mean], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        k, self._steps, self._probed = (int(x) for x in state[:3])
        self._mean = float(state[3])
        # Before the sampler's own state is loaded, which is that of this k.
        if k != self.k:
            self.sampler.set_k(k)

    def extra_repr(self) -> str:
        return f"rmse_log_z={self.rmse_log_z:g}, least={self.least}, most={self.most}"
