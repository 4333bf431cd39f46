"""Plots and tables of what the benchmarks wrote.

python benchmarks/plots.py            # results/*.csv into results/*.svg and *.png
python benchmarks/plots.py --table    # the steps as a table for the README
"""

import argparse
import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "manyclass"
# How near to exact training's perplexity counts as there.
CLOSE = 1.005
Rows = list[dict[str, str]]

# Colours of Okabe and Ito, which the colour-blind can tell apart; ours strong, the floor black.
STEPS = {
    "products": ("matrix products alone", "#000000", "--"),
    OURS: (OURS, "#D55E00", "-"),
    "torch sparse embedding": ("torch, sparse by hand", "#0072B2", "-"),
    "TensorFlow": ("TensorFlow sampled softmax", "#009E73", "-"),
    "TensorFlow, Keras Adagrad": ("TensorFlow, Keras Adagrad", "#009E73", ":"),
    "torch adaptive softmax": ("torch adaptive softmax", "#CC79A7", "-"),
    "torch linear_cross_entropy": ("torch linear_cross_entropy", "#0072B2", ":"),
    "torch exact": ("torch exact softmax", "#56B4E9", "-"),
}
DRAWS = {
    "importance": ("Importance", "#0072B2", "-"),
    "importance, uniform": ("Importance, uniform", "#56B4E9", "-"),
    "bernoulli": ("Bernoulli", "#009E73", "-"),
    "systematic": ("Systematic", "#D55E00", "-"),
    "minibatch explicit, systematic": ("explicit targets + Systematic", "#CC79A7", "-"),
    "half explicit, half systematic": ("half explicit, half Systematic", "#000000", "--"),
}
DESIGNS = {
    "importance": ("Importance", "#0072B2", "-"),
    "bernoulli": ("Bernoulli", "#009E73", "-"),
    "bernoulli, proportional": ("Bernoulli.proportional", "#009E73", ":"),
    "systematic": ("Systematic", "#D55E00", "-"),
    "systematic, stratified": ("Systematic, stratified", "#D55E00", ":"),
    "learned": ("Learned", "#000000", "-"),
    "learned, by cluster": ("Learned, by cluster", "#000000", ":"),
    "clustered": ("Clustered", "#CC79A7", "-"),
    "nearest": ("Nearest", "#E69F00", "-"),
    "in batch": ("InBatch", "#56B4E9", "-"),
}


def read(path: Path, huge: int) -> Rows:
    """The rows with or without huge pages that have numbers."""
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["huge_pages"] == str(huge) and not row.get("note")]


@dataclass
class End:
    """Where a line ends, and what is written there."""

    x: float
    y: float
    label: str
    colour: str


def lines(axes: "Axes", rows: Rows, kind: str, column: str, styles: dict[str, tuple[str, str, str]]) -> None:
    """One line for each contender against the number of classes, each with its name at its end."""
    from matplotlib.patheffects import withStroke

    ends = []
    for name, (label, colour, dash) in styles.items():
        points = sorted((int(row["num_classes"]), float(row[column])) for row in rows if row[kind] == name)
        if points:
            thick = 2.6 if label == OURS else 1.6
            axes.plot(*zip(*points, strict=True), dash, color=colour, marker="o", ms=4, lw=thick)
            ends.append(End(*points[-1], label, colour))
    axes.set_xscale("log")
    axes.set_xlabel("classes")
    axes.margins(y=0.1)
    axes.figure.canvas.draw()
    last = max(end.x for end in ends)
    # To the right of the last size there is room; a line that ends before rises, and has room above it to the left.
    for whole in (True, False):
        for end in apart([end for end in ends if (end.x == last) == whole], axes):
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


def apart(ends: list[End], axes: "Axes") -> list[End]:
    """The ends with heights at which their names do not overlap."""
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
    rows = read(results / "step.csv", 0)
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds a training step")
    axes.set_title("Time of a whole step: batch 256, 128 dimensions, 1000 classes drawn", loc="left")
    lines(axes, rows, "contender", "step_ms", STEPS)


def step_memory(axes: "Axes", results: Path) -> None:
    rows = [row for row in read(results / "step.csv", 0) if row["contender"] != "products"]
    axes.set_yscale("log")
    axes.set_ylabel("GiB at the peak of the process")
    axes.set_title("Memory of training: table, Adagrad's state and what a step needs", loc="left")
    lines(axes, rows, "contender", "peak_gib", STEPS)


def step_floor(axes: "Axes", results: Path) -> None:
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
    axes.bar_label(bars, [figures(row["to_products"]) for row in rows], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(1, max(ratios) * 2)
    axes.set_xlabel("times the matrix products alone")
    axes.set_title(f"A whole step over its floor, {power_of_ten(size)} classes", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


def draw_time(axes: "Axes", results: Path) -> None:
    axes.set_ylim(0, 0.3)
    axes.set_ylabel("a draw over the step's matrix products")
    axes.set_title("Time of a draw: 256 targets, k = 1000", loc="left")
    lines(axes, read(results / "draws.csv", 0), "sampler", "ratio", DRAWS)


def quality(axes: "Axes", results: Path) -> None:
    with (results / "quality.csv").open() as file:
        points = [(row["run"], float(row["seconds"]), float(row["perplexity"])) for row in csv.DictReader(file)]
    runs = {name: [(x, y) for run, x, y in points if run == name] for name in dict.fromkeys(p[0] for p in points)}
    target = CLOSE * runs["exact"][-1][1]
    shades = iter(("#F2C6A5", "#DE9A6B", "#B0703F", "#7A4A25"))
    for name, curve in runs.items():
        exact, again = name == "exact", name.endswith("again")
        colour = "#0072B2" if exact else "#D55E00" if again else next(shades)
        label = "exact softmax" if exact else f"Systematic, {name}"
        thick = 2.4 if exact or again else 1.6
        axes.plot(*zip(*curve, strict=True), color=colour, marker="o", ms=3, lw=thick, zorder=2 + again, label=label)
    axes.legend(frameon=False, loc="upper right")
    axes.axhline(target, color="#666666", lw=1, ls="--")
    axes.annotate(
        "0.5 % above exact training's end",
        (0.01, target),
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
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds a training step, without upkeep")
    axes.set_title("Time of a step by sampling design: batch 1024, 64 dimensions, k = 256", loc="left")
    lines(axes, read(results / "design_cost.csv", 1), "design", "step_ms", DESIGNS)


PLOTS: dict[str, tuple[str, Callable[["Axes", Path], None]]] = {
    "step_time": ("step.csv", step_time),
    "step_memory": ("step.csv", step_memory),
    "step_floor": ("step.csv", step_floor),
    "draw_time": ("draws.csv", draw_time),
    "quality": ("quality.csv", quality),
    "design_cost": ("design_cost.csv", design_cost),
}


def plot(results: Path) -> list[Path]:
    """Writes each plot whose numbers are there, as SVG and as PNG, and says which."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": "#E3E6EA",
        # The same numbers give the same file.
        "svg.hashsalt": "manyclass",
    }
    written = []
    for name, (source, draw) in PLOTS.items():
        if not (results / source).exists():
            continue
        with pyplot.rc_context(style):
            figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
            draw(axes, results)
            for ending in ("svg", "png"):
                written.append(results / f"{name}.{ending}")
                metadata = {"Date": None} if ending == "svg" else None
                figure.savefig(written[-1], dpi=160, bbox_inches="tight", metadata=metadata)
            pyplot.close(figure)
    return written


def table(results: Path, huge: int) -> str:
    """The steps as Markdown: milliseconds, what they are of the products, and memory."""
    rows = {(row["contender"], int(row["num_classes"])): row for row in read(results / "step.csv", huge)}
    sizes = sorted({size for _, size in rows})
    heads = [f"{power_of_ten(size)}: ms | × products | GiB" for size in sizes]
    out = [f"| step, {'huge' if huge else 'small'} pages | {' | '.join(heads)} |", "|---" * (1 + 3 * len(sizes)) + "|"]
    for name in dict.fromkeys(name for name, _ in rows):
        cells = [name]
        for size in sizes:
            row = rows.get((name, size))
            cells += [figures(row[column]) if row else "–" for column in ("step_ms", "to_products", "peak_gib")]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def power_of_ten(size: int) -> str:
    exponent = str(round(math.log10(size)))
    if size != 10 ** int(exponent):
        return str(size)
    return "10" + exponent.translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def figures(number: str) -> str:
    """A number as a table has it: three figures at most, never fewer digits than its whole part."""
    value = float(number)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of steps instead")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder with the CSV files")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.results, 0), table(arguments.results, 1), sep="\n\n")
        return
    for path in plot(arguments.results):
        print(path)


if __name__ == "__main__":
    main()
