"""Learning rates, each the best of one grid by the exact log likelihood at the last step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyclass.lab.experiment import Lab
from manyclass.lab.softmax_regression import EXACT, Method, final, settings
from manyclass.report import Curve, Panel

GRID = tuple(2.0**power for power in range(-7, -1))

# The paper gives exact training and the approximations of the normaliser one rate.
NORMALISATION = {
    "exact": EXACT,
    "importance": Method(),
    "Bernoulli": Method(sampler="Bernoulli"),
    "systematic": Method(sampler="systematic"),
}


@dataclass(frozen=True)
class Sweep:
    """The exact log likelihood at the end, for each method and rate the mean over seeds; NaN where one diverged."""

    log_likelihood: Mapping[str, list[float]]

    @property
    def best(self) -> float:
        """The rate that is best for all methods together: by the mean over methods; one that diverges is out."""
        columns = zip(*self.log_likelihood.values(), strict=True)
        means = [sum(column) / len(column) for column in columns]
        return GRID[max(range(len(GRID)), key=lambda i: -math.inf if math.isnan(means[i]) else means[i])]

    def curves(self) -> list[Curve]:
        """Minus the log likelihood, so that a logarithmic axis shows it near 0."""
        return [
            Curve(label, GRID, [-value for value in values], points=True)
            for label, values in self.log_likelihood.items()
        ]


def panel(title: str, *sweeps: Sweep) -> Panel:
    """Sweeps as a picture."""
    curves = [curve for sweep in sweeps for curve in sweep.curves()]
    return Panel(title, "learning rate", "negative log likelihood at the end", curves, log_x=True, log_y=True)


def sweep(
    lab: Lab,
    methods: Mapping[str, Method],
    *,
    iterations: int | None = None,
    seeds: Sequence[int] | None = None,
) -> Sweep:
    """Train each method with each rate, on the lab's seeds for it and for its iterations unless others are given."""
    seeds = lab.sweep_seeds if seeds is None else seeds
    cells = [
        {
            "method": settings(method),
            "seed": seed,
            "rate": rate,
            "iterations": iterations or lab.scale.iterations,
        }
        for seed in seeds
        for method in methods.values()
        for rate in GRID
    ]
    results = iter(lab.map(final, cells))
    totals = {label: [0.0] * len(GRID) for label in methods}
    for _ in seeds:
        for label in methods:
            for i in range(len(GRID)):
                value = next(results)["log_likelihood"]
                totals[label][i] += (math.nan if value is None else value) / len(seeds)
    return Sweep(totals)


def shared(lab: Lab) -> Sweep:
    """Of exact training and the approximations of the normaliser."""
    return sweep(lab, NORMALISATION)
