"""Samplers, objectives and optimisers by name: the one registry for the estimator, the tasks and the command line."""

import re
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer

from manyclass import _check, defaults, objectives
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
    Tailored,
)

SAMPLERS: dict[str, Callable[[ClassCounts, int], Sampler]] = {
    "learned": lambda counts, k: Learned(counts, k, order="cluster"),
    "systematic": lambda counts, k: Systematic(counts, k, order="cluster"),
    "tailored": lambda counts, k: Tailored(counts, k),
    "clustered": lambda counts, k: Clustered(counts, k),
    "importance": lambda counts, k: Importance(counts, k),
    "bernoulli": lambda counts, k: Bernoulli(counts, k),
    "exact": lambda counts, k: Exhaustive(counts.num_classes),
}
SAMPLER_ALIASES = {"exhaustive": "exact"}

OBJECTIVES: dict[str, Callable[[], Objective]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", objective.__name__).lower(): objective
    for objective in (
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
    "adagrad": lambda parameters, learning_rate: RowAdagrad(parameters, learning_rate),
    "adam": lambda parameters, learning_rate: RowAdam(parameters, learning_rate),
    "sgd": lambda parameters, learning_rate: RowSGD(parameters, learning_rate),
}
LEARNING_RATES = {"adagrad": 0.1, "adam": 0.01, "sgd": 0.5}


def check_options(
    *,
    sampler: object = None,
    objective: object = None,
    optimizer: str | None = None,
    learning_rate: float | None = None,
    k: object = None,
    rmse_log_z: float | None = None,
) -> None:
    """Check options that the estimator, the tasks and the command line share; None means the default.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a name is not in its registry, a number is not above 0, or `rmse_log_z` is given with a number k, or
            with a sampler but without k "auto".
    """
    names = (
        ("sampler", sampler, (*SAMPLERS, *SAMPLER_ALIASES)),
        ("objective", objective, tuple(OBJECTIVES)),
        ("optimizer", optimizer, tuple(OPTIMIZERS)),
    )
    for name, value, allowed in names:
        if value is not None:
            _check.choice(name, value, allowed)
    if learning_rate is not None:
        _check.number("learning_rate", learning_rate, low=0, strict=True)
    _check.draws(k, rmse_log_z)
    # A sampler with a fixed k would ignore it in silence.
    if sampler is not None and rmse_log_z is not None and k is None:
        got = f"got {rmse_log_z:g} with sampler = {sampler!r}"
        raise ValueError(f"`rmse_log_z` must come with `k` 'auto' if a `sampler` is given, {got}")


def make_sampler(
    name: str | None, counts: ClassCounts, *, k: int | str | None = None, rmse_log_z: float | None = None
) -> Sampler:
    """Build a sampler by name; it draws all classes if there are at most k.

    Args:
        name: a key of `SAMPLERS` or `SAMPLER_ALIASES`. None: the default sampler of a head with counts.
        counts: the counts of the classes.
        k: classes drawn per step; "auto": as many as `rmse_log_z` needs. None: 1,024, or "auto" without a
            name.
        rmse_log_z: the error of log Z̃ to keep to. None: 0.15.

    Raises:
        ValueError: the name is unknown, or k is "auto" for a sampler whose k is fixed.

    Example:
        >>> import torch
        >>> type(make_sampler("systematic", ClassCounts(torch.ones(5000)), k=100)).__name__
        'Systematic'
    """
    if name is None:
        return choose_sampler(None, counts.num_classes, counts, k=k, rmse_log_z=rmse_log_z)
    check_options(sampler=name, k=k, rmse_log_z=rmse_log_z)
    drawn = k if isinstance(k, int) else defaults.K
    if counts.num_classes <= drawn:
        return Exhaustive(counts.num_classes)
    sampler = SAMPLERS[SAMPLER_ALIASES.get(name, name)](counts, drawn)
    return make_budget(sampler, rmse_log_z) if k == "auto" else sampler


def make_budget(sampler: Sampler, rmse_log_z: float | None = None) -> Budget:
    """Wrap a sampler so that it draws as many classes as the chosen error of log Z̃ needs.

    Raises:
        ValueError: the k of the sampler is fixed.
    """
    if not isinstance(sampler, AdjustableSampler):
        raise ValueError(f"`k` must be a number or None for {type(sampler).__name__}, whose k is fixed, got 'auto'")
    return Budget(sampler, defaults.RMSE_LOG_Z if rmse_log_z is None else rmse_log_z)
