"""Medians and bands over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyclass.report import Curve

Values = Sequence[float | None]


def floats(values: Values) -> list[float]:
    """None, which is how JSON has numbers that are not finite, as NaN."""
    return [math.nan if value is None else float(value) for value in values]


@dataclass(frozen=True)
class Spread:
    """The median of a number over seeds, and the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Values) -> "Spread":
        known = [value for value in floats(values) if not math.isnan(value)]
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(float(np.median(known)), min(known), max(known))

    def __str__(self) -> str:
        return self.text()

    def text(self, form: str = ".3g") -> str:
        if math.isnan(self.median):
            return "–"
        return f"{shown(self.median, form)} ({shown(self.low, form)} to {shown(self.high, form)})"


def shown(value: float, form: str) -> str:
    """A number with a minus that is one, and no minus before 0."""
    return format(value + 0.0, form).replace("-", "−")


def band(
    label: str,
    x: Sequence[float],
    runs: Sequence[Values],
    *,
    dashed: bool = False,
    points: bool = False,
    like: str | None = None,
) -> Curve:
    """The median over runs at each point, between the quartiles; a gap where a run has no number."""
    table = np.array([floats(run) for run in runs], dtype=float)
    low, middle, high = (np.quantile(table, q, axis=0).tolist() for q in (0.25, 0.5, 0.75))
    if len(runs) == 1:
        return Curve(label, x, middle, dashed=dashed, points=points, like=like)
    return Curve(label, x, middle, low, high, dashed=dashed, points=points, like=like)
