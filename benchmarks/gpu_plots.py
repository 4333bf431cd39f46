"""Plots of the benchmarks of steps on a GPU; `plots.py` writes them."""

import csv
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, as in the other plots.
CONTENDER_COLOURS = {
    "floor": "#000000",
    "triton": "#D55E00",
    "replayed": "#8C2D04",
    "auto": "#E69F00",
    "eager": "#F0E442",
    "default": "#CC79A7",
    "plain torch": "#0072B2",
    "exact": "#56B4E9",
    "exact, compiled": "#009E73",
    "liger": "#999999",
    "cut cross entropy": "#666666",
}
PRECISION_COLOURS = ("#0072B2", "#009E73", "#D55E00")
IMPL_STYLES = {"eager": "--", "triton": "-"}


def gpu_steps(axes: "Axes", results: Path) -> None:
    """Plot the time of a step of each contender in each setting, with the 20 % and 80 % quantiles."""
    rows = [row for row in _read(results / "gpu.csv") if row["ms"]]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    width = 0.85 / len(CONTENDER_COLOURS)
    for place, (contender, colour) in enumerate(CONTENDER_COLOURS.items()):
        found = [row for row in rows if row["contender"] == contender]
        if found:
            medians = [float(row["ms"]) for row in found]
            below = [float(row["ms"]) - float(row["ms_p20"]) for row in found]
            above = [float(row["ms_p80"]) - float(row["ms"]) for row in found]
            at = [settings.index(row["setting"]) + (place + 0.5) * width - 0.425 for row in found]
            axes.bar(at, medians, width, yerr=[below, above], color=colour, label=contender, ecolor="#555555")
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds per step")
    axes.set_xticks(range(len(settings)), settings)
    axes.set_title(f"A training step on {rows[0]['device']}, launches included", loc="left")
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def gpu_curves(axes: "Axes", results: Path) -> None:
    """Plot the held-out loss by step: the mean over the seeds, and their range."""
    rows = _read(results / "gpu_curves.csv")
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    for precision, impl in dict.fromkeys((row["precision"], row["impl"]) for row in rows):
        points: dict[int, list[float]] = {}
        for row in rows:
            if (row["precision"], row["impl"]) == (precision, impl):
                points.setdefault(int(row["step"]), []).append(float(row["loss"]))
        colour = PRECISION_COLOURS[precisions.index(precision) % len(PRECISION_COLOURS)]
        means = [statistics.mean(losses) for losses in points.values()]
        axes.plot(list(points), means, IMPL_STYLES.get(impl, ":"), color=colour, label=f"{precision}, {impl}")
        lows, highs = ([choose(losses) for losses in points.values()] for choose in (min, max))
        axes.fill_between(list(points), lows, highs, color=colour, alpha=0.15, linewidth=0)
    seeds = len({row["seed"] for row in rows})
    axes.set_xlabel("steps")
    axes.set_ylabel("held-out loss, nats")
    axes.set_title(
        f"Loss with Triton's kernels and with torch's operators: mean and range of {seeds} seeds", loc="left"
    )
    axes.legend(fontsize=8, frameon=False)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))
