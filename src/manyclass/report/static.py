"""Static figures for print, drawn with matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyclass.report.colours import colour, marker
from manyclass.report.content import Curve, Figure, Panel

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E6EA",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    # A fixed salt makes the SVG files reproducible.
    "svg.hashsalt": "manyclass",
}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "x"}
_PANEL_WIDTH, _PANEL_HEIGHT, _PANELS_PER_ROW = 4.3, 3.3, 3  # inches, inches, panels


def draw(figure: Figure, colours: dict[str, int], folder: Path) -> list[Path]:
    """Write a figure as SVG and PNG, and return the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    number = len(figure.panels)
    columns = number if number <= _PANELS_PER_ROW else (2 if number == 4 else _PANELS_PER_ROW)
    rows = -(-number // columns)
    written = []
    with pyplot.rc_context(_STYLE):
        size = (_PANEL_WIDTH * columns, _PANEL_HEIGHT * rows + 0.6)
        canvas, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        for axes in grid.flat[number:]:
            axes.set_visible(False)
        legend: dict[str, Artist] = {}
        for axes, panel in zip(grid.flat, figure.panels, strict=False):
            legend |= _draw_panel(axes, panel, colours)
        # Fit as many legend columns as possible: about 0.08 inches per letter, and half an inch for the line.
        widest = 0.5 + 0.08 * max(map(len, legend), default=1)
        canvas.legend(
            legend.values(), legend, loc="outside lower center", ncols=max(1, min(len(legend), int(size[0] / widest)))
        )
        for ending in ("svg", "png"):
            written.append(folder / f"{figure.name}.{ending}")
            # A link in a folder that was received may lead anywhere.
            if written[-1].is_symlink():
                written[-1].unlink()
            canvas.savefig(written[-1], dpi=180, metadata={"Date": None} if ending == "svg" else None)
            # The second file has the layout of the first, which takes longer than the drawing.
            canvas.set_layout_engine("none")
        pyplot.close(canvas)
    return written


def _draw_panel(axes: "Axes", panel: Panel, colours: dict[str, int]) -> "dict[str, Artist]":
    """Draw one panel and return its legend entries by label."""
    legend: dict[str, Artist] = {}
    for curve in panel.curves:
        number = colours[curve.colour_of or curve.label]
        ink = colour(number)
        (legend[curve.label],) = axes.plot(
            curve.x,
            curve.y,
            "--" if curve.dashed else "-",
            color=ink,
            lw=1.4,
            marker=_MARKERS[marker(number)] if _has_markers(curve, number) else None,
            ms=3.5,
            markevery=1 if curve.points else 0.1,
        )
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=ink, alpha=0.15, lw=0)
    if panel.log_x:
        axes.set_xscale("log")
        _label_log(axes.xaxis)
    if panel.log_y:
        axes.set_yscale("log")
        _label_log(axes.yaxis)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    return legend


def _label_log(axis: "Axis") -> None:
    """Label 1, 2 and 5 times each power of ten if there are few powers; more labels would overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_minor_formatter(NullFormatter())
    low, high = axis.get_data_interval()
    if low > 0 and high < 200 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _has_markers(curve: Curve, number: int) -> bool:
    return curve.points or marker(number) != "circle"
