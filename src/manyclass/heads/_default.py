"""The sampler of a head that was not given one."""

import torch

from manyclass import _check, defaults
from manyclass.counts import ClassCounts
from manyclass.samplers import Budget, Exhaustive, Learned, Sampler, Systematic


def choose_sampler(
    sampler: Sampler | None,
    num_classes: int,
    counts: ClassCounts | None,
    *,
    k: int | str | None,
    rmse_log_z: float | None,
) -> Sampler:
    """The sampler that was given, or the best we know for so many classes, with counts or without.

    Raises:
        ValueError: k beside a sampler, which has its own; an error wanted of a k that is fixed.
    """
    if sampler is not None and k is not None:
        raise ValueError(f"`k` must be None where a `sampler` is given, which has its own, got {k!r}")
    _check.draws(k, rmse_log_z)
    if sampler is not None:
        return sampler
    number = k if isinstance(k, int) else defaults.K
    if num_classes <= number:
        return Exhaustive(num_classes)
    # By clusters of class vectors the error is a tenth less, for next to nothing.
    if counts is None:
        drawn: Systematic | Learned = Systematic(torch.ones(num_classes), number, order="cluster")
    else:
        drawn = Learned(counts, number, order="cluster")
    return Budget(drawn, defaults.RMSE_LOG_Z if rmse_log_z is None else rmse_log_z) if k == "auto" else drawn
