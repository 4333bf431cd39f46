"""Tables of numbers on the standard output."""

import sys

from rich.console import Console
from rich.table import Table

from manyclass.tasks import Measured


def console() -> Console:
    """Return a console for the standard output, of a fixed width if that is a pipe."""
    return Console(width=None if sys.stdout.isatty() else 110)


def print_measured(measured: Measured) -> None:
    """Print means by class frequency, and over all examples."""
    names = list(measured.metrics)
    table = Table()
    for column in ("times in training", "examples", "loss", "perplexity", *names):
        table.add_column(column, justify="right")
    for band in measured.bands:
        table.add_row(
            band.name,
            f"{band.examples:,.0f}",
            f"{band.loss:.4f}",
            f"{band.perplexity:,.2f}",
            *(f"{band.metrics[name]:.4f}" for name in names),
        )
    table.add_section()
    table.add_row(
        "all",
        f"{measured.examples:,.0f}",
        f"{measured.loss:.4f}",
        f"{measured.perplexity:,.2f}",
        *(f"{measured.metrics[name]:.4f}" for name in names),
        style="bold",
    )
    console().print(table)
