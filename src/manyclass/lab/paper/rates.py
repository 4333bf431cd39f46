"""Sweeps over learning rates, which maximise the exact log likelihood at the last step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from manyclass.lab.experiment import Lab
from manyclass.lab.softmax_regression import EXACT, Method, final_log_likelihood
from manyclass.report import Curve, Panel

LEARNING_RATES = tuple(2.0**power for power in range(-7, -1))

# In the paper, exact training and the approximations of the normaliser share one learning rate.
NORMALISATION = {
    "exact": EXACT,
    "importance": Method(),
    "Bernoulli": Method(sampler="Bernoulli"),
    "systematic": Method(sampler="systematic"),
}


@dataclass(frozen=True)
class Sweep:
    """Final exact log likelihood per method and learning rate, mean over seeds; NaN if a seed diverged."""

    log_likelihood: Mapping[str, list[float]]

    @property
    def best(self) -> float:
        """The learning rate with the highest mean over methods, among those with which no method diverges."""
        columns = zip(*self.log_likelihood.values(), strict=True)
        means = [sum(column) / len(column) for column in columns]
        comparable = [-math.inf if math.isnan(mean) else mean for mean in means]
        return LEARNING_RATES[comparable.index(max(comparable))]

    def curves(self) -> list[Curve]:
        """Return curves of the negative log likelihood, which a logarithmic axis can show."""
        return [
            Curve(label, LEARNING_RATES, [-value for value in values], points=True)
            for label, values in self.log_likelihood.items()
        ]


def panel(title: str, *sweeps: Sweep) -> Panel:
    """Plot sweeps."""
    curves = [curve for sweep in sweeps for curve in sweep.curves()]
    return Panel(title, "learning rate", "final negative log likelihood", curves, log_x=True, log_y=True)


def sweep(
    lab: Lab, methods: Mapping[str, Method], *, iterations: int | None = None, seeds: Sequence[int] | None = None
) -> Sweep:
    """Train each method with each learning rate; seeds and iterations default to the lab's."""
    seeds = lab.sweep_seeds if seeds is None else seeds
    steps = iterations or lab.scale.iterations
    cells = [
        {"method": asdict(method), "seed": seed, "rate": rate, "iterations": steps}
        for seed in seeds
        for method in methods.values()
        for rate in LEARNING_RATES
    ]
    results = iter(lab.map(final_log_likelihood, cells))
    totals = {label: [0.0] * len(LEARNING_RATES) for label in methods}
    for _ in seeds:
        for label in methods:
            for i in range(len(LEARNING_RATES)):
                value = next(results)["log_likelihood"]
                totals[label][i] += (math.nan if value is None else value) / len(seeds)
    return Sweep(totals)


def normalisation_sweep(lab: Lab) -> Sweep:
    """Sweep exact training and the approximations of the normaliser together."""
    return sweep(lab, NORMALISATION)
