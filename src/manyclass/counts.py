"""Class counts, and the exponent of the paper's Bernoulli probabilities."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass._shard import Shard

CHUNK_CLASSES = 1 << 22
MAX_COUNT = 1e100  # of a loaded state; powers of it must be finite


class ClassCounts(nn.Module):
    """Counts of C classes, from a tensor, from targets or from a stream of targets.

    An unseen class counts as seen `smoothing` times; the others keep their counts. Without smoothing its inclusion
    probability b = f^α would be 0, it would be missing from every Z̃, and Z̃ would be biased.

    Args:
        counts: C finite numbers that are not negative and not all zero.
        smoothing: the count of an unseen class; 0 turns smoothing off, None is the smallest positive count.

    Raises:
        ValueError: a count is negative, NaN or infinite, all counts are zero, or `smoothing` is negative.

    Example:
        >>> counts = ClassCounts(torch.tensor([6, 3, 0]))
        >>> counts.frequency()
        tensor([0.6000, 0.3000, 0.1000], dtype=torch.float64)
        >>> counts.update(torch.tensor([2, 2]))
        >>> counts.weights()
        tensor([6., 3., 2.], dtype=torch.float64)
    """

    saved = by_class = ("raw",)
    shard: Shard | None = None
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(self, counts: Tensor, *, smoothing: float | None = 1.0) -> None:
        super().__init__()
        self.smoothing = None if smoothing is None else _check.number("smoothing", smoothing, low=0)
        self.raw = _check.nonnegative_vector("counts", counts).clone()

    @classmethod
    def from_targets(cls, targets: Tensor, num_classes: int, *, smoothing: float = 1.0) -> "ClassCounts":
        """Count the targets of a training set, a tensor of class ids of any shape."""
        counts = cls.streaming(num_classes, smoothing=smoothing)
        counts.update(targets)
        return counts

    @classmethod
    def streaming(cls, num_classes: int, *, smoothing: float = 1.0) -> "ClassCounts":
        """Return counts that start at zero and grow by `update`."""
        _check.integer("num_classes", num_classes, 1)
        counts = cls(torch.ones(num_classes, device="cpu"), smoothing=smoothing)
        counts.raw.zero_()
        return counts

    @classmethod
    def of(cls, counts: "ClassCounts | Tensor", num_classes: int) -> "ClassCounts":
        """Return counts, or a tensor of them, as ClassCounts of `num_classes` classes."""
        counts = counts if isinstance(counts, ClassCounts) else cls(counts)
        if counts.num_classes != num_classes:
            raise ValueError(f"`counts` must have length {num_classes}, got {counts.num_classes}")
        return counts

    def move(self, device: torch.device) -> None:
        """Move the counts to a device."""
        self.raw = self.raw.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved counts of as many classes."""
        raw = saved_vector("raw", state["raw"], torch.float64, len(self.raw))
        if (bad := (raw > MAX_COUNT) | ((raw > 0) & (raw < 1 / MAX_COUNT))).any():
            raise ValueError(f"`raw` must be 0 or within 1e±100, {_check.at_first(raw, bad)}")
        total = float(raw.sum())
        if self.smoothing == 0 and (total if self.shard is None else self.shard.sum(total)) == 0:
            raise ValueError(f"`raw` must not all be 0 when smoothing is off, got {len(raw)} zeros")
        self.raw = raw

    device = property(lambda self: self.raw.device)

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return self.raw.shape[0] if self.shard is None else self.shard.num_classes

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone, of counts that all processes hold."""
        if self.shard is None:
            self.raw, self.shard = self.raw[shard.classes].clone(), shard

    def update(self, targets: Tensor) -> None:
        """Count more targets, a tensor of class ids of any shape; samplers use them after their next `refresh()`.

        If classes are divided among processes, each counts the targets of its classes: give all targets to all.
        """
        targets = _check.ids("targets", targets, self.num_classes).reshape(-1)
        _check.device("targets", targets, self.device)
        if self.shard is not None:
            targets = targets[self.shard.holds(targets)] - self.shard.first
        self.raw.index_add_(0, targets, targets.new_ones(targets.shape, dtype=torch.float64))

    def weights(self, power: float = 1.0) -> Tensor:
        """Return the smoothed counts to a power, float64 [C]; 0 is uniform, 0.75 is word2vec's choice.

        If classes are divided among processes, those of this one.
        """
        seen = self.raw > 0
        unseen = self.smoothing
        if unseen is None:
            least = float(self.raw[seen].min()) if bool(seen.any()) else math.inf
            least = least if self.shard is None else float(self.shard.numbers(least).min())
            unseen = least if least < math.inf else 1.0
        smoothed = torch.where(seen, self.raw, unseen) if unseen else self.raw.clone()
        return smoothed if power == 1 else smoothed.pow_(power)

    def frequency(self) -> Tensor:
        """Return f, the smoothed counts divided by their sum, float64 [C]."""
        weights = self.weights()
        return weights.div_(self._total(weights))

    def alpha(self, k: int) -> float:
        """Solve Σ b = k for the exponent α in [0, 1] of b = f^α: 1 at k = 1, exactly 0 at k = C.

        Raises:
            ValueError: k is outside [1, C], or smoothing is off and k exceeds the number of classes that occur.
        """
        if self.shard is not None:
            raise ValueError(f"`k` must be solved for before counts are divided among {self.shard.ranks} processes")
        return exponent(self.frequency(), k)

    def _total(self, weights: Tensor) -> float:
        total = float(weights.sum())
        total = total if self.shard is None else self.shard.sum(total)
        if total == 0:
            raise ValueError(f"`counts` must not all be 0 when smoothing is off, got {self.num_classes} zeros")
        return total

    def resize(self, num_classes: int) -> None:
        """Add unseen classes, or drop the last ones.

        Raises:
            ValueError: the classes are divided among processes.
        """
        if self.shard is not None:
            raise ValueError(f"`counts` must be whole to be resized to {num_classes} classes, got one part of them")
        _check.integer("num_classes", num_classes, 1)
        counts = self.raw.new_zeros(num_classes)
        kept = min(num_classes, self.num_classes)
        counts[:kept] = self.raw[:kept]
        self.raw = counts

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"num_classes={self.num_classes}, smoothing={self.smoothing}"


def exponent(frequency: Tensor, k: int) -> float:
    """Solve Σ f^α = k for α in [0, 1], over the classes with f > 0, for frequencies f that sum to at most 1."""
    _check.integer("k", k, 1, len(frequency))
    f = frequency[frequency > 0]
    if k > len(f):
        raise ValueError(
            f"`k` must be at most {len(f)}, the number of classes that occur, when smoothing is off, got {k}"
        )
    if k == len(f):
        return 0.0
    # Newton's method on log Σ f^α, which is convex and decreasing in α: steps from the left never overshoot.
    alpha = 0.0
    for _ in range(100):
        total = slope = 0.0
        for chunk in f.split(CHUNK_CLASSES):
            log_f = chunk.log()
            b = (alpha * log_f).exp_()
            total += float(b.sum())
            slope += float(log_f.mul_(b).sum())
        step = (math.log(total) - math.log(k)) * total / -slope
        alpha += step
        if abs(step) <= 1e-15:
            break
    return min(1.0, max(0.0, alpha))
