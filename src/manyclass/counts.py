"""How often each class occurs, and the exponent of the paper's Bernoulli probabilities."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check

_CHUNK = 1 << 22


class ClassCounts(nn.Module):
    """Counts of C classes, from a tensor, from targets or from a stream of them.

    A class that was never seen counts as seen `smoothing` times; the others keep their counts. Without that its
    probability b = f^α of being drawn would be 0, it would be missing from every Z̃, and Z̃ would be biased.

    Args:
        counts: C numbers that are finite and not negative, not all zero.
        smoothing: what an unseen class counts for; 0 switches it off.

    Raises:
        ValueError: counts negative, NaN, infinite or all zero; smoothing negative.

    Example:
        >>> counts = ClassCounts(torch.tensor([6, 3, 0]))
        >>> counts.frequency()
        tensor([0.6000, 0.3000, 0.1000], dtype=torch.float64)
        >>> counts.update(torch.tensor([2, 2]))
        >>> counts.weights()
        tensor([6., 3., 2.], dtype=torch.float64)
    """

    _bits: Tensor

    def __init__(self, counts: Tensor, *, smoothing: float = 1.0) -> None:
        super().__init__()
        self.smoothing = _check.number("smoothing", smoothing, low=0)
        self._store(_check.masses("counts", counts).clone())

    @classmethod
    def from_targets(cls, targets: Tensor, num_classes: int, *, smoothing: float = 1.0) -> "ClassCounts":
        """Count the targets of a training set, a tensor of ids of any shape."""
        counts = cls.streaming(num_classes, smoothing=smoothing)
        counts.update(targets)
        return counts

    @classmethod
    def streaming(cls, num_classes: int, *, smoothing: float = 1.0) -> "ClassCounts":
        """Counts that start at nothing and grow by `update`."""
        _check.whole("num_classes", num_classes, 1)
        counts = cls(torch.ones(num_classes), smoothing=smoothing)
        counts.raw.zero_()
        return counts

    @classmethod
    def of(cls, counts: "ClassCounts | Tensor", num_classes: int) -> "ClassCounts":
        """Counts, or a tensor of them, as ClassCounts of so many classes."""
        counts = counts if isinstance(counts, ClassCounts) else cls(counts)
        if counts.num_classes != num_classes:
            raise ValueError(f"`counts` must have length {num_classes}, got {counts.num_classes}")
        return counts

    def _store(self, counts: Tensor) -> None:
        # As int64 the bits are safe from `.half()` and `.to(dtype)`, which convert every floating buffer of a model.
        self.register_buffer("_bits", counts.view(torch.int64))

    @property
    def raw(self) -> Tensor:
        """float64 [C]: the counts as they were observed."""
        return self._bits.view(torch.float64)

    @property
    def num_classes(self) -> int:
        return self._bits.shape[0]

    def update(self, targets: Tensor) -> None:
        """Count more targets, a tensor of ids of any shape. Samplers see them at their next `refresh()`."""
        targets = _check.ids("targets", targets, self.num_classes).reshape(-1)
        _check.device("targets", targets, self._bits.device)
        self.raw.index_add_(0, targets, targets.new_ones(targets.shape, dtype=torch.float64))

    def weights(self, power: float = 1.0) -> Tensor:
        """float64 [C]: the smoothed counts to a power (0: uniform; 0.75: word2vec's)."""
        smoothed = torch.where(self.raw > 0, self.raw, self.smoothing) if self.smoothing else self.raw.clone()
        return smoothed if power == 1 else smoothed.pow_(power)

    def frequency(self) -> Tensor:
        """float64 [C]: f, the smoothed counts divided by their sum."""
        weights = self.weights()
        return weights.div_(_check_total(weights))

    def alpha(self, k: int) -> float:
        """The exponent α in [0, 1] at which b = f^α sums to k over all classes: 1 at k = 1, exactly 0 at k = C.

        Raises:
            ValueError: k outside [1, C], or more than the number of classes that occur when smoothing is off.
        """
        return exponent(self.frequency(), k)

    def resize(self, num_classes: int) -> None:
        """Add classes that have not been seen, or retire the last ones."""
        _check.whole("num_classes", num_classes, 1)
        counts = self.raw.new_zeros(num_classes)
        kept = min(num_classes, self.num_classes)
        counts[:kept] = self.raw[:kept]
        self._store(counts)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, smoothing={self.smoothing:g}"


def _check_total(weights: Tensor) -> float:
    total = float(weights.sum())
    if total == 0:
        raise ValueError(f"`counts` must not all be 0 when smoothing is off, got {len(weights)} zeros")
    return total


def exponent(frequency: Tensor, k: int) -> float:
    """The α in [0, 1] at which Σ f^α = k, for frequencies f that sum to at most 1; classes of f = 0 stay out of it."""
    _check.whole("k", k, 1, len(frequency))
    f = frequency[frequency > 0]
    if k > len(f):
        raise ValueError(
            f"`k` must be at most {len(f)}, the number of classes that occur, when smoothing is off, got {k}"
        )
    if k == len(f):
        return 0.0
    # Newton's method on log Σ f^α, a convex and falling function of α: from the left no step overshoots.
    alpha = 0.0
    for _ in range(100):
        total = slope = 0.0
        for chunk in f.split(_CHUNK):
            log_f = chunk.log()
            b = (alpha * log_f).exp_()
            total += float(b.sum())
            slope += float(log_f.mul_(b).sum())
        step = (math.log(total) - math.log(k)) * total / -slope
        alpha += step
        if abs(step) <= 1e-15:
            break
    return min(1.0, max(0.0, alpha))
