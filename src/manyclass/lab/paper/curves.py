"""Curves of training by several methods, beside exact training, and the two numbers that verdicts are made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyclass.lab.experiment import Lab
from manyclass.lab.problem import NUM_CLASSES
from manyclass.lab.softmax_regression import Method, curve, settings
from manyclass.lab.spread import Spread, band, floats
from manyclass.report import Curve, Panel, Table

NEAR = 0.05
MEASURES = {
    "log_likelihood": ("Exact log likelihood", "mean log likelihood"),
    "bias_exact": ("Bias against exact training", "log mean |difference|"),
    "bias_true": ("Bias against the true model", "log mean |difference|"),
    "bias_fresh": ("The same, on fresh inputs", "log mean |difference|"),
}


@dataclass(frozen=True)
class Curves:
    """What training measured, by label: one result for each seed."""

    seeds: Sequence[int]
    points: Sequence[int]
    rates: Mapping[str, float]
    runs: Mapping[str, Sequence[Mapping[str, Any]]]

    def mean_bias(self, label: str) -> list[float]:
        """For each seed the mean over iterations of the bias against exact training; NaN where it diverged."""
        # The first point is the common start, where the difference is 0 and its log is not finite.
        return [_mean(self.points[1:], floats(run["bias_exact"])[1:]) for run in self.runs[label]]

    def iterations(self, label: str) -> list[float]:
        """For each seed when the bias against the true model first came within 0.05 of exact's last; inf: never."""
        found = []
        for run, exact in zip(self.runs[label], self.runs["exact"], strict=True):
            level = floats(exact["bias_true"])[-1] + NEAR
            found.append(worst_last(_first_below(self.points, floats(run["bias_true"]), level)))
        return found

    def last(self, label: str, measure: str) -> list[float]:
        return [floats(run[measure])[-1] for run in self.runs[label]]

    def curve(self, label: str, measure: str) -> Curve:
        return band(label, self.points, [run[measure] for run in self.runs[label]])

    def panels(self, measures: Sequence[str], labels: Sequence[str] | None = None) -> list[Panel]:
        labels = list(self.runs) if labels is None else labels
        return [
            Panel(
                MEASURES[measure][0],
                "iteration",
                MEASURES[measure][1],
                # Exact training has no distance from itself.
                [self.curve(label, measure) for label in labels if (label, measure) != ("exact", "bias_exact")],
            )
            for measure in measures
        ]

    def table(self) -> Table:
        """A row for each method: its rate, and what verdicts are made of."""
        rows = []
        for label in self.runs:
            iterations = self.iterations(label)
            never = sum(map(math.isinf, iterations))
            reached = [value for value in iterations if math.isfinite(value)]
            times = [Spread.of(reached).text(".0f")] if reached else []
            rows.append(
                [
                    label,
                    f"{self.rates[label]:g}",
                    Spread.of(self.last(label, "log_likelihood")).text(".4f") + self._diverged(label),
                    "–" if label == "exact" else Spread.of(self.mean_bias(label)).text(".2f"),
                    "; ".join([*times, *([f"never on {never} of {len(iterations)}"] if never else [])]),
                    Spread.of(self.last(label, "bias_true")).text(".3f"),
                    Spread.of(self.last(label, "bias_fresh")).text(".3f"),
                ]
            )
        return Table(
            [
                "method",
                "rate",
                "log likelihood at the end",
                "mean bias against exact",
                "iterations to exact's bias",
                "bias against true, end",
                "fresh inputs",
            ],
            rows,
            "Median over seeds, with the least and the greatest. Iterations: until the bias against the true model is "
            f"within {NEAR} of what exact training ends at.",
        )

    def _diverged(self, label: str) -> str:
        number = sum(run["diverged"] for run in self.runs[label])
        return f"; diverged on {number} of {len(self.seeds)}" if number else ""

    def rows(self, **common: object) -> list[dict[str, object]]:
        """Everything, a row for each seed and point."""
        return [
            {
                **common,
                "method": label,
                "rate": self.rates[label],
                "seed": seed,
                "iteration": point,
                **{measure: run[measure][i] for measure in MEASURES},
                "seconds": run["seconds"],
            }
            for label, runs in self.runs.items()
            for seed, run in zip(self.seeds, runs, strict=True)
            for i, point in enumerate(self.points)
        ]


def train(
    lab: Lab,
    methods: Mapping[str, Method],
    rates: Mapping[str, float],
    *,
    iterations: int,
    num_classes: int = NUM_CLASSES,
) -> Curves:
    """Train each method with its rate on every seed; `rates` has exact training's under "exact"."""
    points = lab.scale.points(iterations)
    # Seed by seed: a process then shares exact training among the methods.
    cells = [
        {
            "method": settings(method),
            "seed": seed,
            "rate": rates[label],
            "exact_rate": rates["exact"],
            "points": points,
            "num_classes": num_classes,
        }
        for seed in lab.seeds
        for label, method in methods.items()
    ]
    results = lab.map(curve, cells)
    runs = {label: results[i :: len(methods)] for i, label in enumerate(methods)}
    return Curves(lab.seeds, points, dict(rates), runs)


def worst_last(value: float) -> float:
    """What diverged, or never came, comes behind all others."""
    return math.inf if math.isnan(value) else value


def iterations_text(spread: Spread) -> str:
    return spread.text(".0f").replace("inf", "never")


def _mean(x: Sequence[int], y: list[float]) -> float:
    """The mean height of the line through the points."""
    return float(np.trapezoid(y, x)) / (x[-1] - x[0])


def _first_below(x: Sequence[int], y: list[float], level: float) -> float:
    """Where y first falls to the level, on the line between the two points around it; NaN: nowhere."""
    for i, value in enumerate(y):
        if value <= level:
            if i == 0:
                return float(x[0])
            share = (y[i - 1] - level) / (y[i - 1] - value)
            return x[i - 1] + share * (x[i] - x[i - 1])
    return math.nan
