"""What several commands have in common."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from manyclass.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


class SectionedCommand(click.Command):
    """A command of many options, whose help has them under headings: each heading with the first of its options."""

    sections: ClassVar[dict[str, str]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        heading, rows = "Options", list[tuple[str, str]]()
        found: dict[str, list[tuple[str, str]]] = {heading: rows}
        for parameter in self.get_params(ctx):
            heading = self.sections.get(parameter.name or "", heading)
            record = None if isinstance(parameter, click.Argument) else parameter.get_help_record(ctx)
            if record is not None:
                found.setdefault(heading, []).append(record)
        for heading, rows in found.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def path_argument() -> click.Path:
    """A path; whether something is there is seen when it is read."""
    return click.Path(path_type=Path)


def checkpoint_option() -> Callable[[F], F]:
    """Return the option that chooses a checkpoint of a model."""
    names = click.Choice(["best", "newest", "previous"])
    return click.option("--checkpoint", type=names, help="Which checkpoint to load; default: best.")


def source_options(*, training: bool) -> Callable[[F], F]:
    """How to read data. When a model is there it knows its kind, and how text falls into tokens."""
    options = [
        click.option(
            "--format", help="Of rows: svmlight, csv, tsv, parquet, npz or npy; default: by the file's ending."
        ),
        click.option(
            "--label", metavar="COLUMN", help="Of tables: the column of labels; default: label, target, class or y."
        ),
        click.option("--labels", type=path_argument(), metavar="FILE", help="Of .npy: a .npy file of labels."),
    ]
    if training:
        options = [
            click.option("--text", is_flag=True, help="DATA is text, or a folder of train.txt and valid.txt."),
            click.option("--sequences", is_flag=True, help="DATA has user and item in each line."),
            click.option("--triples", is_flag=True, help="DATA has triples, or is a folder of train, valid and test."),
            click.option(
                "--held-out", type=path_argument(), metavar="FILE", help="To evaluate on; default: a part of DATA."
            ),
            *options,
            click.option(
                "--split", type=click.Choice(["spaces", "words"]), help="Text: what a token is; default: spaces."
            ),
            click.option("--min-count", type=click.IntRange(min=1), help="Text: rarer tokens are one class, <unk>."),
        ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@contextmanager
def as_user_error() -> Iterator[None]:
    """What is wrong with a value, or a library that is missing, is the user's to mend."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def check_device(name: str | None) -> None:
    """Raise if torch finds no such device here."""
    from manyclass import _check

    if name is not None:
        with as_user_error():
            _check.place(name)
