"""Training curves of several methods next to exact training, and the two numbers that verdicts are based on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from manyclass.lab.experiment import Lab
from manyclass.lab.problem import NUM_CLASSES
from manyclass.lab.softmax_regression import Method, training_curve
from manyclass.lab.spread import Spread, band, none_to_nan
from manyclass.report import Curve, Panel, ReportTable

BIAS_TOLERANCE = 0.05  # nats
MEASURES = {
    "log_likelihood": ("Exact log likelihood", "mean log likelihood"),
    "bias_exact": ("Bias against exact training", "log mean |difference|"),
    "bias_true": ("Bias against the true model", "log mean |difference|"),
    "bias_fresh": ("Bias against the true model, fresh inputs", "log mean |difference|"),
}


@dataclass(frozen=True)
class Curves:
    """Measurements during training, by label, with one result per seed."""

    seeds: Sequence[int]
    points: Sequence[int]
    rates: Mapping[str, float]
    runs: Mapping[str, Sequence[Mapping[str, Any]]]

    def mean_bias(self, label: str) -> list[float]:
        """Return, per seed, the mean bias against exact training over all iterations; NaN if a run diverged."""
        # Skip the first point: all methods start equal, so the difference is 0 and its log is not finite.
        return [_mean(self.points[1:], none_to_nan(run["bias_exact"])[1:]) for run in self.runs[label]]

    def iterations(self, label: str) -> list[float]:
        """Return, per seed, the iterations until the bias is near exact training's final one; inf if never."""
        found = []
        for run, exact in zip(self.runs[label], self.runs["exact"], strict=True):
            level = none_to_nan(exact["bias_true"])[-1] + BIAS_TOLERANCE
            found.append(nan_to_inf(_first_below(self.points, none_to_nan(run["bias_true"]), level)))
        return found

    def last(self, label: str, measure: str) -> list[float]:
        """Return, per seed, the last value of a measure."""
        return [none_to_nan(run[measure])[-1] for run in self.runs[label]]

    def _curve(self, label: str, measure: str) -> Curve:
        return band(label, self.points, [run[measure] for run in self.runs[label]])

    def panels(self, measures: Sequence[str], labels: Sequence[str] | None = None) -> list[Panel]:
        """Return one panel per measure with a curve per label."""
        labels = list(self.runs) if labels is None else labels
        return [
            Panel(
                MEASURES[measure][0],
                "iteration",
                MEASURES[measure][1],
                # Exact training has no bias against itself.
                [self._curve(label, measure) for label in labels if (label, measure) != ("exact", "bias_exact")],
            )
            for measure in measures
        ]

    def table(self) -> ReportTable:
        """Return a table with a row per method: its learning rate and the numbers that verdicts are based on."""
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
                    "; ".join([*times, *([f"never on {never} of {len(iterations)} seeds"] if never else [])]),
                    Spread.of(self.last(label, "bias_true")).text(".3f"),
                    Spread.of(self.last(label, "bias_fresh")).text(".3f"),
                ]
            )
        return ReportTable(
            [
                "method",
                "learning rate",
                "final log likelihood",
                "mean bias, exact",
                "iterations to exact bias",
                "final bias, true model",
                "final bias, fresh inputs",
            ],
            rows,
            "Median over seeds, with minimum and maximum. Bias is against exact training, mean over iterations, and "
            "against the true model at the end, also on fresh inputs. Iterations to exact bias: until the bias against "
            f"the true model is within {BIAS_TOLERANCE} of the final bias of exact training.",
        )

    def _diverged(self, label: str) -> str:
        number = sum(run["diverged"] for run in self.runs[label])
        return f"; diverged on {number} of {len(self.seeds)} seeds" if number else ""

    def rows(self, **common: object) -> list[dict[str, object]]:
        """Return all measurements, one row per method, seed and iteration."""
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
    """Train each method with its learning rate on every seed; `rates` must have the key "exact" too."""
    points = lab.scale.points(iterations)
    # Seed by seed, so that a worker computes exact training once for all methods.
    cells = [
        {
            "method": asdict(method),
            "seed": seed,
            "rate": rates[label],
            "exact_rate": rates["exact"],
            "points": points,
            "num_classes": num_classes,
        }
        for seed in lab.seeds
        for label, method in methods.items()
    ]
    results = lab.map(training_curve, cells)
    runs = {label: results[i :: len(methods)] for i, label in enumerate(methods)}
    return Curves(lab.seeds, points, dict(rates), runs)


def nan_to_inf(value: float) -> float:
    """Map NaN to inf so that diverged runs sort last."""
    return math.inf if math.isnan(value) else value


def iterations_text(spread: Spread) -> str:
    """Format numbers of iterations, with "never" for inf."""
    return spread.text(".0f").replace("inf", "never")


def _mean(x: Sequence[int], y: list[float]) -> float:
    """Return the mean height of the line through the points."""
    return float(np.trapezoid(y, x)) / (x[-1] - x[0])


def _first_below(x: Sequence[int], y: list[float], level: float) -> float:
    """Return the x where y first falls to the level, by linear interpolation; NaN if it never does."""
    for i, value in enumerate(y):
        if value <= level:
            if i == 0:
                return float(x[0])
            share = (y[i - 1] - level) / (y[i - 1] - value)
            return x[i - 1] + share * (x[i] - x[i - 1])
    return math.nan
