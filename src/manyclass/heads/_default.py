"""The default sampler of a head."""

import math

from torch import Tensor, nn

from manyclass import _check, defaults
from manyclass.counts import ClassCounts
from manyclass.samplers import Automatic, Exhaustive, Learned, Sampler


def choose_sampler(
    sampler: Sampler | None,
    num_classes: int,
    counts: ClassCounts | None,
    *,
    k: int | str | None,
    rmse_log_z: float | None,
) -> Sampler:
    """Return the given sampler, or the default for this number of classes, with counts or without.

    Raises:
        TypeError: k is neither an int nor a string.
        ValueError: k is given together with a sampler, is below 1, or `rmse_log_z` is given together with either.
    """
    if sampler is not None and k is not None:
        raise ValueError(f"`k` must be None if a `sampler` is given, which has a k already, got {k!r}")
    _check.draws(k, rmse_log_z)
    if sampler is not None and rmse_log_z is not None:
        raise ValueError(f"`rmse_log_z` must be None if a `sampler` is given, got {rmse_log_z:g}")
    if sampler is not None:
        return sampler
    if num_classes <= (k if isinstance(k, int) else defaults.K):
        return Exhaustive(num_classes)
    counts = ClassCounts.streaming(num_classes) if counts is None else counts
    if isinstance(k, int):
        # The order by clusters of class vectors lowers the error by a tenth at almost no cost.
        return Learned(counts, k, order="cluster")
    return Automatic(counts, defaults.RMSE_LOG_Z if rmse_log_z is None else rmse_log_z, least=defaults.K)


def known_frequency(sampler: Sampler) -> Tensor | None:
    """Return the frequencies [C] of the sampler's counts; None if it has none, or if they are equal or 0 somewhere."""
    held = sampler.modules() if isinstance(sampler, nn.Module) else ()
    for counts in held:
        if isinstance(counts, ClassCounts):
            frequency = counts.frequency()
            low, high = (float(x) for x in frequency.aminmax()) if len(frequency) else (math.inf, 0.0)
            if counts.shard is not None:
                lows, highs = counts.shard.numbers(low, high).T
                low, high = float(lows.min()), float(highs.max())
            return frequency if 0 < low < high else None
    return None
