"""Tables of numbers on the standard output."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from manyclass.tasks import Band, Measured


def console() -> Console:
    """Return a console for the standard output, of a fixed width if that is a pipe."""
    return Console(width=None if sys.stdout.isatty() else 110)


def print_measured(measured: Measured) -> None:
    """Print means by class frequency, and over all examples; a row each, or a column each if rows are too wide."""
    rows = [_texts(band.name, band) for band in measured.bands] + [_texts("all", measured)]
    head = ["times in training", "examples", "loss", "perplexity", *measured.metrics]
    output, table = console(), Table()
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    if output.measure(table, options=output.options.update(width=1 << 20)).maximum > output.width:
        table = Table()
        for name in (head[0], *(row[0] for row in rows)):
            table.add_column(name, justify="right", style="bold" if name == "all" else None)
        for cells in zip(head[1:], *(row[1:] for row in rows), strict=True):
            table.add_row(*cells)
    output.print(table)


def _texts(name: str, means: Band | Measured) -> Sequence[str]:
    values = [f"{value:.4f}" for value in means.metrics.values()]
    return [name, f"{means.examples:,.0f}", f"{means.loss:.4f}", f"{means.perplexity:,.2f}", *values]
