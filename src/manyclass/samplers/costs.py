"""The seconds of a training step by design, which the default sampler decides by."""

import math
from dataclasses import dataclass, fields

from manyclass import _check

EXACT, SHARED, TAILORED = "exact", "shared", "tailored"


@dataclass(frozen=True)
class Costs:
    """Seconds of the loss and its gradients in one step; NaN: not measured yet.

    Args:
        exact: with all classes.
        shared: with `Learned`, at the least k.
        tailored: with `Tailored`, at the least k.
        per_class: of each further class that is drawn.
    """

    exact: float = math.nan
    shared: float = math.nan
    tailored: float = math.nan
    per_class: float = math.nan

    def of(self, design: str, further: int) -> float:
        """Return the seconds of a design that draws a number of classes beyond the least k."""
        if design == EXACT:
            return self.exact
        return float(getattr(self, design)) + self.per_class * further


def checked_costs(costs: Costs) -> Costs:
    """Return costs that are complete: with NaN in a comparison no decision would ever be taken.

    Raises:
        TypeError: `costs` is not a `Costs`.
        ValueError: one of them is negative, infinite or missing; only `tailored` may be NaN.
    """
    if not isinstance(costs, Costs):
        raise TypeError(f"`costs` must be a Costs, got {type(costs).__name__}")
    for field in fields(Costs):
        seconds = getattr(costs, field.name)
        # Each further class may be free; the tailored design is measured when it is first tried.
        if field.name != TAILORED or not math.isnan(seconds):
            _check.number(f"costs.{field.name}", seconds, low=0, strict=field.name != "per_class")
    return costs


def milliseconds(seconds: float) -> str:
    """Return seconds as text, in milliseconds."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
