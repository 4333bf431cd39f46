"""The default sampler of a head."""

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
    """Return the given sampler, or the default for this number of classes, with counts or without.

    Raises:
        TypeError: k is neither an int nor a string.
        ValueError: k is given together with a sampler, is below 1, or `rmse_log_z` is given without k "auto".
    """
    if sampler is not None and k is not None:
        raise ValueError(f"`k` must be None if a `sampler` is given, which has a k already, got {k!r}")
    _check.draws(k, rmse_log_z)
    if sampler is not None:
        return sampler
    number = k if isinstance(k, int) else defaults.K
    if num_classes <= number:
        return Exhaustive(num_classes)
    # The order by clusters of class vectors lowers the error by a tenth at almost no cost.
    if counts is None:
        drawn: Systematic | Learned = Systematic(torch.ones(num_classes), number, order="cluster")
    else:
        drawn = Learned(counts, number, order="cluster")
    return Budget(drawn, defaults.RMSE_LOG_Z if rmse_log_z is None else rmse_log_z) if k == "auto" else drawn
