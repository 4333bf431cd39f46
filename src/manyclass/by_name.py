"""Samplers, objectives and optimisers by the names that a user writes."""

import re
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from manyclass import _check, objectives
from manyclass.counts import ClassCounts
from manyclass.heads import choose_sampler
from manyclass.objectives import Objective
from manyclass.optim import RowAdagrad, RowAdam, RowSGD
from manyclass.samplers import (
    AdjustableSampler,
    Bernoulli,
    Budget,
    Clustered,
    Exhaustive,
    Importance,
    Learned,
    Sampler,
    Systematic,
)

K = 1024  # classes drawn where nobody says how many, as of a head
RMSE_LOG_Z = 0.1

SAMPLERS: dict[str, Callable[[ClassCounts, int], Sampler]] = {
    "learned": lambda counts, k: Learned(counts, k, order="cluster"),
    "systematic": lambda counts, k: Systematic(counts, k, order="cluster"),
    "clustered": lambda counts, k: Clustered(counts, k),
    "importance": lambda counts, k: Importance(counts, k),
    "bernoulli": lambda counts, k: Bernoulli(counts, k),
    "exact": lambda counts, k: Exhaustive(counts.num_classes),
}

OBJECTIVES: dict[str, Callable[[], Objective]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", made.__name__).lower(): made
    for made in (
        objectives.Likelihood,
        objectives.PlainImportance,
        objectives.SubsetSoftmax,
        objectives.LogisticRanking,
        objectives.HingeRanking,
        objectives.NegativeSampling,
        objectives.NoiseContrastive,
        objectives.BlackOut,
    )
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], Optimizer]] = {
    "adagrad": lambda parameters, rate: RowAdagrad(parameters, rate),
    "adam": lambda parameters, rate: RowAdam(parameters, rate),
    "sgd": lambda parameters, rate: RowSGD(parameters, rate),
}
RATES = {"adagrad": 0.1, "adam": 0.01, "sgd": 0.5}


def make_sampler(
    name: str | None, counts: ClassCounts, *, k: int | str | None = None, rmse_log_z: float | None = None
) -> Sampler:
    """The sampler of a name; all classes, where there are no more than would be drawn.

    Args:
        name: a key of `SAMPLERS`. None: what a head with counts does.
        counts: of the classes.
        k: how many to draw; "auto": as many as the error takes. None: 1,024.
        rmse_log_z: the error of log Z̃ wanted, where k is "auto".

    Raises:
        ValueError: no such name; k "auto" with a sampler whose k is fixed.

    Example:
        >>> import torch
        >>> type(make_sampler("systematic", ClassCounts(torch.ones(5000)), k=100)).__name__
        'Systematic'
    """
    if name is None:
        return choose_sampler(None, counts.num_classes, counts, k=k, rmse_log_z=rmse_log_z)
    _check.choice("sampler", name, tuple(SAMPLERS))
    drawn = k if isinstance(k, int) else K
    if counts.num_classes <= drawn:
        return Exhaustive(counts.num_classes)
    made = SAMPLERS[name](counts, drawn)
    return make_budget(made, rmse_log_z) if k == "auto" else made


def make_budget(sampler: Sampler, rmse_log_z: float | None = None) -> Budget:
    """As many of a sampler's classes as an error takes.

    Raises:
        ValueError: its k is fixed.
    """
    if not isinstance(sampler, AdjustableSampler):
        raise ValueError(f"`k` must be a number or None for {type(sampler).__name__}, whose k is fixed, got 'auto'")
    return Budget(sampler, RMSE_LOG_Z if rmse_log_z is None else rmse_log_z)
