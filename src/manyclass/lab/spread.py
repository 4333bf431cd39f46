"""Medians, extremes and quartile bands over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyclass.report import Curve

Values = Sequence[float | None]


def none_to_nan(values: Values) -> list[float]:
    """Map None, which stands for a non-finite number in JSON, to NaN."""
    return [math.nan if value is None else float(value) for value in values]


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of a number over seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Values) -> "Spread":
        """Summarise the values that are not missing."""
        known = [value for value in none_to_nan(values) if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(float(np.median(known)), min(known), max(known))

    def __str__(self) -> str:
        return self.text()

    def text(self, form: str = ".3g") -> str:
        """Format as "median (minimum to maximum)"."""
        if math.isnan(self.median):
            return "–"
        return (
            f"{format_number(self.median, form)} ({format_number(self.low, form)} to {format_number(self.high, form)})"
        )


def format_number(value: float, form: str) -> str:
    """Format a number with a typographic minus sign, and without one before 0."""
    return format(value + 0.0, form).replace("-", "−")


def band(
    label: str,
    x: Sequence[float],
    runs: Sequence[Values],
    *,
    dashed: bool = False,
    points: bool = False,
    colour_of: str | None = None,
) -> Curve:
    """Return a curve of the median over runs with a quartile band; a missing value leaves a gap."""
    table = np.array([none_to_nan(run) for run in runs], dtype=float)
    low, middle, high = (np.quantile(table, q, axis=0).tolist() for q in (0.25, 0.5, 0.75))
    if len(runs) == 1:
        return Curve(label, x, middle, dashed=dashed, points=points, colour_of=colour_of)
    return Curve(label, x, middle, low, high, dashed=dashed, points=points, colour_of=colour_of)
