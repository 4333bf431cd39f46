"""Options and checks that several commands share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from manyclass.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


class SectionedCommand(click.Command):
    """A command whose help groups options under headings; `sections` maps the first option of each to its heading."""

    sections: ClassVar[dict[str, str]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
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
    """Return a path type that does not check existence; reading the file does."""
    return click.Path(path_type=Path)


def checkpoint_option() -> Callable[[F], F]:
    """Return the option that chooses a checkpoint of a model."""
    names = click.Choice(["best", "newest", "previous"])
    return click.option("--checkpoint", type=names, help="Which checkpoint to load; default: best.")


def source_options(*, training: bool) -> Callable[[F], F]:
    """Return the options of how to read data; a trained model knows its kind of data and how text is split."""
    options = [
        click.option("--format", help="Rows: svmlight, csv, tsv, parquet, npz or npy; default: by the file's ending."),
        click.option(
            "--label", metavar="COLUMN", help="Tables: column of the labels; default: label, target, class or y."
        ),
        click.option("--labels", type=path_argument(), metavar="FILE", help="With .npy: a .npy file of labels."),
    ]
    if training:
        options = [
            click.option("--text", is_flag=True, help="DATA is text, or a folder with train.txt and valid.txt."),
            click.option("--sequences", is_flag=True, help="DATA has a user and an item in each line."),
            click.option(
                "--triples", is_flag=True, help="DATA has triples, or is a folder with train, valid and test."
            ),
            click.option(
                "--held-out", type=path_argument(), metavar="FILE", help="File to evaluate on; default: a part of DATA."
            ),
            *options,
            click.option(
                "--split",
                type=click.Choice(["spaces", "words"]),
                help="Text: split into tokens at spaces, or into words; default: spaces.",
            ),
            click.option(
                "--min-count", type=click.IntRange(min=1), help="Text: tokens rarer than this become one class, <unk>."
            ),
        ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@contextmanager
def as_user_error() -> Iterator[None]:
    """Turn a bad value or a missing library into a UserError."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def check_device(name: str | None) -> None:
    """Raise a UserError if torch finds no such device."""
    from manyclass import _check

    if name is not None:
        with as_user_error():
            _check.place(name)
