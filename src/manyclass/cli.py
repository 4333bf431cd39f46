"""The command line: parses, calls, prints."""

import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from manyclass.errors import UserError
from manyclass.lab.experiment import Claim
from manyclass.lab.work import Watch


@click.group()
def app() -> None:
    """Probabilistic classifiers over very many classes."""


@app.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default="paper-report", show_default=True, help="Folder for the report."
)
@click.option("--quick", is_flag=True, help="2 seeds and fewer iterations: a minute or two.")
@click.option("--full", is_flag=True, help="20 seeds: an hour or more.")
@click.option("--only", default="", help="Experiments to run, separated by commas.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first problem.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes, of one thread each; default: one a core.")
@click.option("--claims", is_flag=True, help="Print the table of claims and nothing else.")
def paper(out: Path, quick: bool, full: bool, only: str, seed: int, jobs: int | None, claims: bool) -> None:
    """Reproduce the paper: run its experiments and write a report of each claim beside its evidence.

    What is finished is kept: an interrupted run goes on where it stopped, and a changed option reruns only what it
    touches.
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
        with _progress() as watch:
            done = reproduce(out, scale=scale, seed=seed, only=names or None, jobs=jobs, watch=watch)
    except ImportError as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        raise UserError("interrupted; what is finished is kept: the same command goes on") from None
    _print_claims(done.claims)
    if not claims:
        print(f"report   {done.report}\nresults  {done.results}")


@app.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="A text file, or a folder with train.txt and valid.txt; .gz, .xz and .bz2 too. Default: the source of "
    "Python's standard library.",
)
@click.option("--held-out", type=click.Path(path_type=Path), help="A text file to evaluate on.")
@click.option(
    "--split", type=click.Choice(["spaces", "words"]), default="spaces", show_default=True, help="What a token is."
)
@click.option(
    "--min-count", type=click.IntRange(min=1), default=1, show_default=True, help="Rarer tokens are one class, <unk>."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default="study-report", show_default=True, help="Folder for the report."
)
@click.option("--quick", is_flag=True, help="30,000 tokens, one epoch: a few minutes.")
@click.option("--full", is_flag=True, help="All of the text, 3 epochs, 3 seeds: hours, or minutes on a GPU.")
@click.option("--tokens", type=click.IntRange(min=1), help="How many to train on.")
@click.option("--epochs", type=click.IntRange(min=1), help="Of every training.")
@click.option("--seeds", type=click.IntRange(min=1), help="How many.")
@click.option("--k", type=click.IntRange(min=1), help="Classes scored in trainings; default: one in a hundred.")
@click.option("--design", "designs", multiple=True, help="One to compare; give it again for more. Default: all.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first.")
@click.option("--device", default="cpu", show_default=True, help="Where models are: cpu, cuda.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings at once.")
@click.option("--report/--no-report", default=True, help="Whether to draw the page.")
@click.option("--redraw", is_flag=True, help="Only draw the page of what an earlier run into --out measured.")
def study(
    data: Path | None,
    held_out: Path | None,
    split: str,
    min_count: int,
    out: Path,
    quick: bool,
    full: bool,
    tokens: int | None,
    epochs: int | None,
    seeds: int | None,
    k: int | None,
    designs: tuple[str, ...],
    seed: int,
    device: str,
    jobs: int,
    report: bool,
    redraw: bool,
) -> None:
    """Compare sampling designs on a text: the error of each, its time, and what it trains, beside exact training.

    Half an hour on two cores by default, for the first 300,000 tokens. What is finished is kept: an interrupted run
    goes on where it stopped.
    """
    from manyclass.data import read_text, standard_library
    from manyclass.lab import study as room

    if quick and full:
        raise UserError("`--quick` and `--full` must not both be given")
    if data is None and held_out is not None:
        raise UserError(f"`--held-out` must come with `--data`, got {held_out} alone")
    base = room.QUICK if quick else room.FULL if full else room.DEFAULT
    scale = replace(base, tokens=tokens or base.tokens, epochs=epochs or base.epochs, seeds=seeds or base.seeds)
    room.check_designs(designs)
    room.check_device(device)
    try:
        if redraw:
            done = room.redraw(out)
        else:
            if data is None:
                text = standard_library()
            else:
                text = read_text(data, held_out=held_out, split=split, min_count=min_count)
            with _progress() as watch:
                done = room.study(
                    text,
                    out,
                    scale=scale,
                    designs=designs or None,
                    k=k,
                    seed=seed,
                    device=device,
                    jobs=jobs,
                    report=report,
                    watch=watch,
                )
    except ImportError as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        raise UserError("interrupted; what is finished is kept: the same command goes on") from None
    print("\n".join(textwrap.fill(sentence, 110, subsequent_indent="  ") for sentence in done.summary))
    if done.page is not None:
        print(f"report   {done.page}")
    print(f"results  {done.results}")


def _print_claims(claims: Sequence[Claim]) -> None:
    # A pipe has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(show_lines=True)
    for column in ("claim", "the paper says", "measured", "holds"):
        table.add_column(column, overflow="fold", no_wrap=column in ("claim", "holds"))
    for claim in claims:
        measured = f"{claim.measured}. {claim.reason}" if claim.reason else claim.measured
        # As text: E[log p̃] is no markup.
        table.add_row(*map(Text, (claim.id, claim.statement, measured, "yes" if claim.holds else "no")))
    console.print(table)


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar for each experiment on a terminal; elsewhere a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield watch


class _Lines:
    def __init__(self) -> None:
        self._shown = (0.0, "")

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name != self._shown[1] or now - self._shown[0] >= 10:
            print(f"{name:12} {done} of {total}", file=sys.stderr, flush=True)
            self._shown = (now, name)


def main() -> None:
    """Run the command line: what a user can mend is one line, and exit code 2; a bug keeps its traceback."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        message = str(error)
    except click.ClickException as error:
        message = error.format_message()
    except click.Abort:
        message = "interrupted"
    else:
        raise SystemExit(code or 0)
    print("manyclass: " + textwrap.shorten(message, 500), file=sys.stderr)
    raise SystemExit(2)
