"""The command `manyclass paper`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyclass.cli.progress import progress
from manyclass.errors import UserError
from manyclass.lab.experiment import Claim


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default="paper-report", show_default=True, help="Folder for the report."
)
@click.option("--quick", is_flag=True, help="2 seeds and fewer iterations: a minute or two.")
@click.option("--full", is_flag=True, help="20 seeds: an hour or more.")
@click.option("--only", default="", help="Experiments to run, separated by commas.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the first problem.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes of one thread each; default: one per core.")
@click.option("--claims", is_flag=True, help="Print only the table of claims.")
def paper(out: Path, quick: bool, full: bool, only: str, seed: int, jobs: int | None, claims: bool) -> None:
    """Reproduce the paper: run its experiments and write a report with the evidence for each claim.

    Finished results are kept: an interrupted run continues where it stopped, and a changed option reruns only the
    experiments it affects.
    """
    from manyclass.lab.paper import DEFAULT, EXPERIMENTS, FULL, QUICK, reproduce

    if quick and full:
        raise UserError("`--quick` and `--full` must not both be given")
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in EXPERIMENTS:
            raise UserError(f"`--only` must be of {', '.join(EXPERIMENTS)}, got {name!r}")
    scale = QUICK if quick else FULL if full else DEFAULT
    try:
        with progress() as on_progress:
            done = reproduce(out, scale=scale, seed=seed, only=names or None, jobs=jobs, on_progress=on_progress)
    except ImportError as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        raise UserError("interrupted; finished results are kept: run the same command to continue") from None
    _print_claims(done.claims)
    if not claims:
        print(f"report   {done.report}\nresults  {done.results}")


def _print_claims(claims: Sequence[Claim]) -> None:
    # A pipe has no width, so one is set.
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(show_lines=True)
    for column in ("claim", "the paper says", "measured", "holds"):
        table.add_column(column, overflow="fold", no_wrap=column in ("claim", "holds"))
    for claim in claims:
        measured = f"{claim.measured}. {claim.reason}" if claim.reason else claim.measured
        # Plain Text, because rich would read E[log p̃] as markup.
        table.add_row(*map(Text, (claim.id, claim.statement, measured, "yes" if claim.holds else "no")))
    console.print(table)
