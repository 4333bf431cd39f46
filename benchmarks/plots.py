"""Plots and tables of the benchmarks' results.

python benchmarks/plots.py            # results/*.csv into results/*.svg and *.png
python benchmarks/plots.py --table    # the steps as a table for the README
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.gpu_plots import gpu_curves, gpu_steps  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = ROOT / "results"
OURS = "manyclass"
TARGET_PERPLEXITY_RATIO = 1.005  # to exact training's perplexity: below it, a sampled training has reached it
Rows = list[dict[str, str]]

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E3E6EA",
    # A fixed salt makes the SVG files reproducible.
    "svg.hashsalt": "manyclass",
}

# Colours of Okabe and Ito, distinguishable by colour-blind readers; ours is the strongest, the floor black.
STEP_STYLES = {
    "products": ("matrix products alone", "#000000", "--"),
    OURS: (OURS, "#D55E00", "-"),
    "torch sparse embedding": ("torch, hand-written sparse", "#0072B2", "-"),
    "TensorFlow": ("TensorFlow sampled softmax", "#009E73", "-"),
    "TensorFlow, Keras Adagrad": ("TensorFlow, Keras Adagrad", "#009E73", ":"),
    "torch adaptive softmax": ("torch adaptive softmax", "#CC79A7", "-"),
    "torch linear_cross_entropy": ("torch linear_cross_entropy", "#0072B2", ":"),
    "torch exact": ("torch exact softmax", "#56B4E9", "-"),
}
DRAW_STYLES = {
    "importance": ("Importance", "#0072B2", "-"),
    "importance, uniform": ("Importance, uniform", "#56B4E9", "-"),
    "bernoulli": ("Bernoulli", "#009E73", "-"),
    "systematic": ("Systematic", "#D55E00", "-"),
    "minibatch explicit, systematic": ("explicit targets + Systematic", "#CC79A7", "-"),
    "half explicit, half systematic": ("half explicit, half Systematic", "#000000", "--"),
}
DESIGN_STYLES = {
    "importance": ("Importance", "#0072B2", "-"),
    "bernoulli": ("Bernoulli", "#009E73", "-"),
    "bernoulli, proportional": ("Bernoulli.proportional", "#009E73", ":"),
    "systematic": ("Systematic", "#D55E00", "-"),
    "systematic, stratified": ("Systematic, stratified", "#D55E00", ":"),
    "learned": ("Learned", "#000000", "-"),
    "learned, by cluster": ("Learned, by cluster", "#000000", ":"),
    "clustered": ("Clustered", "#CC79A7", "-"),
    "tailored": ("Tailored", "#E69F00", "-"),
    "in batch": ("InBatch", "#56B4E9", "-"),
}


def read(path: Path, huge: int) -> Rows:
    """Read the rows that have numbers, with or without huge pages."""
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["huge_pages"] == str(huge) and not row.get("note")]


@dataclass
class LineEnd:
    """Position of a line's end, and its label."""

    x: float
    y: float
    label: str
    colour: str


def plot_lines(axes: "Axes", rows: Rows, kind: str, column: str, styles: dict[str, tuple[str, str, str]]) -> None:
    """Plot one line per contender against the number of classes, with its label at its end."""
    from matplotlib.patheffects import withStroke

    ends = []
    for name, (label, colour, dash) in styles.items():
        points = sorted((int(row["num_classes"]), float(row[column])) for row in rows if row[kind] == name)
        if points:
            thick = 2.6 if label == OURS else 1.6
            axes.plot(*zip(*points, strict=True), dash, color=colour, marker="o", ms=4, lw=thick)
            ends.append(LineEnd(*points[-1], label, colour))
    axes.set_xscale("log")
    axes.set_xlabel("classes")
    axes.margins(y=0.1)
    axes.figure.canvas.draw()
    last = max(end.x for end in ends)
    # Label a line that reaches the last size on the right; a line that ends earlier has space to its upper left.
    for whole in (True, False):
        for end in spread_apart([end for end in ends if (end.x == last) == whole], axes):
            axes.annotate(
                end.label,
                (end.x, end.y),
                (8, 0) if whole else (-8, 5),
                textcoords="offset points",
                annotation_clip=False,
                color=end.colour,
                ha="left" if whole else "right",
                va="center",
                weight="bold" if end.label == OURS else "normal",
                path_effects=[withStroke(linewidth=3, foreground="white")],
            )


def spread_apart(ends: list[LineEnd], axes: "Axes") -> list[LineEnd]:
    """Move the ends vertically until their labels do not overlap."""
    ends = sorted(ends, key=lambda end: end.y)
    heights = [axes.transData.transform((end.x, end.y))[1] for end in ends]
    least = 13 * axes.figure.dpi / 72
    for _ in range(200):
        for i in range(len(heights) - 1):
            overlap = max(0.0, least - (heights[i + 1] - heights[i]))
            heights[i] -= overlap / 2
            heights[i + 1] += overlap / 2
    to_data = axes.transData.inverted()
    return [replace(end, y=to_data.transform((0, height))[1]) for end, height in zip(ends, heights, strict=True)]


def step_time(axes: "Axes", results: Path) -> None:
    """Plot the time of a step."""
    rows = read(results / "step.csv", 0)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds per training step")
    axes.set_title("Time of a whole step: batch 256, 128 dimensions, 1000 classes drawn", loc="left")
    plot_lines(axes, rows, "contender", "step_ms", STEP_STYLES)


def step_memory(axes: "Axes", results: Path) -> None:
    """Plot the peak memory of training."""
    rows = [row for row in read(results / "step.csv", 0) if row["contender"] != "products"]
    axes.set_yscale("log")
    axes.set_ylabel("peak memory of the process, GiB")
    axes.set_title("Memory of training: class table, Adagrad's state and temporary tensors", loc="left")
    plot_lines(axes, rows, "contender", "peak_gib", STEP_STYLES)


def step_floor(axes: "Axes", results: Path) -> None:
    """Plot step times as multiples of the matrix products."""
    everything = read(results / "step.csv", 0)
    sizes = {int(row["num_classes"]) for row in everything}
    size = 10**6 if 10**6 in sizes else max(sizes)
    rows = [row for row in everything if int(row["num_classes"]) == size and row["contender"] != "products"]
    rows.sort(key=lambda row: float(row["to_products"]), reverse=True)
    ratios = [float(row["to_products"]) for row in rows]
    ours = [row["contender"].startswith(OURS) for row in rows]
    bars = axes.barh(
        [row["contender"] for row in rows],
        [ratio - 1 for ratio in ratios],
        left=1,
        color=["#D55E00" if mine else "#9AA5B1" for mine in ours],
        height=0.7,
    )
    axes.bar_label(bars, [format_figures(row["to_products"]) for row in rows], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(1, max(ratios) * 2)
    axes.set_xlabel("step time / time of its matrix products")
    axes.set_title(f"A whole step relative to its matrix products, {power_of_ten(size)} classes", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


def draw_time(axes: "Axes", results: Path) -> None:
    """Plot the time of a draw relative to the matrix products."""
    axes.set_ylim(0, 0.3)
    axes.set_ylabel("draw time / time of the step's matrix products")
    axes.set_title("Time of a draw: 256 targets, k = 1000", loc="left")
    plot_lines(axes, read(results / "draws.csv", 0), "sampler", "ratio", DRAW_STYLES)


def quality(axes: "Axes", results: Path) -> None:
    """Plot perplexity against training time."""
    with (results / "quality.csv").open() as file:
        points = [(row["run"], float(row["seconds"]), float(row["perplexity"])) for row in csv.DictReader(file)]
    runs = {name: [(x, y) for run, x, y in points if run == name] for name in dict.fromkeys(p[0] for p in points)}
    target = TARGET_PERPLEXITY_RATIO * runs["exact"][-1][1]
    shades = iter(("#D55E00", "#DE9A6B", "#B0703F"))
    for name, curve in runs.items():
        # A repetition of the first run, to compare times, would hide it.
        if not name.endswith("again"):
            exact = name == "exact"
            colour, label = ("#0072B2", "exact softmax") if exact else (next(shades), f"sampled, {name}")
            thick = 2.4 if exact or colour == "#D55E00" else 1.2
            axes.plot(*zip(*curve, strict=True), color=colour, marker="o", ms=3, lw=thick, zorder=thick, label=label)
    axes.legend(frameon=False, loc="upper right")
    axes.axhline(target, color="#666666", lw=1, ls="--")
    axes.annotate(
        "0.5 % above exact training's end",
        (0.6, target),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color="#666666",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out perplexity")
    axes.set_title("WikiText-2, 33,278 classes: time to quality", loc="left")


def design_cost(axes: "Axes", results: Path) -> None:
    """Plot the time of a step by sampling design."""
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds per training step, without rebuilds")
    axes.set_title("Time of a step by sampling design: batch 1024, 64 dimensions, k = 256", loc="left")
    plot_lines(axes, read(results / "design_cost.csv", 1), "design", "step_ms", DESIGN_STYLES)


PLOTS: dict[str, tuple[str, Callable[["Axes", Path], None]]] = {
    "step_time": ("step.csv", step_time),
    "step_memory": ("step.csv", step_memory),
    "step_floor": ("step.csv", step_floor),
    "draw_time": ("draws.csv", draw_time),
    "quality": ("quality.csv", quality),
    "design_cost": ("design_cost.csv", design_cost),
    "gpu_steps": ("gpu.csv", gpu_steps),
    "gpu_curves": ("gpu_curves.csv", gpu_curves),
}


def plot(results: Path) -> list[Path]:
    """Write each plot that has a CSV file, as SVG and PNG, and return the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, (source, draw) in PLOTS.items():
        if not (results / source).exists():
            continue
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
            draw(axes, results)
            for ending in ("svg", "png"):
                written.append(results / f"{name}.{ending}")
                metadata = {"Date": None} if ending == "svg" else None
                figure.savefig(written[-1], dpi=160, bbox_inches="tight", metadata=metadata)
            pyplot.close(figure)
    return written


def table(results: Path, huge: int) -> str:
    """Return a Markdown table of the steps: milliseconds, multiple of the products, and memory."""
    rows = {(row["contender"], int(row["num_classes"])): row for row in read(results / "step.csv", huge)}
    sizes = sorted({size for _, size in rows})
    heads = [f"{power_of_ten(size)}: ms | × products | GiB" for size in sizes]
    out = [f"| step, {'huge' if huge else 'small'} pages | {' | '.join(heads)} |", "|---" * (1 + 3 * len(sizes)) + "|"]
    for name in dict.fromkeys(name for name, _ in rows):
        cells = [name]
        for size in sizes:
            row = rows.get((name, size))
            cells += [format_figures(row[column]) if row else "–" for column in ("step_ms", "to_products", "peak_gib")]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def power_of_ten(size: int) -> str:
    """Format a power of ten with a superscript exponent."""
    exponent = str(round(math.log10(size)))
    if size != 10 ** int(exponent):
        return str(size)
    return "10" + exponent.translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def format_figures(number: str) -> str:
    """Format a number with at most three figures, but all digits of its integer part."""
    value = float(number)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of steps instead")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.results, 0), table(arguments.results, 1), sep="\n\n")
        return
    for path in plot(arguments.results):
        print(path)


if __name__ == "__main__":
    main()
