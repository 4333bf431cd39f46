"""Options and checks that several commands share."""

import functools
from collections.abc import Callable, Iterator, Sequence
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


def kept_option(group: str, flag: str, *, help: str, type: Any = None, metavar: Any = None, parse: Any = None) -> Any:
    """Return an option whose value, if given, goes into `kept(group)` instead of the arguments of the command."""

    def keep(context: click.Context, option: click.Parameter, value: Any) -> None:
        if value is not None:
            kept(group)[str(option.name)] = value if parse is None else parse(value)

    # Without default=None a flag that is not given would be False.
    shown = {"type": type, "metavar": metavar, "help": help}
    return click.option(*flag.split(), **shown, default=None, expose_value=False, callback=keep)


def kept(group: str) -> dict[str, Any]:
    """Return the options of a group that were given on the command line, by name."""
    found: dict[str, Any] = click.get_current_context().meta.setdefault(f"manyclass.{group}", {})
    return found


def apply(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """Return a decorator that adds options in the order given."""
    return lambda function: functools.reduce(lambda command, option: option(command), reversed(options), function)


def checkpoint_option() -> Callable[[F], F]:
    """Return the option that chooses a checkpoint of a model."""
    names = click.Choice(["best", "newest", "previous"])
    return click.option("--checkpoint", type=names, help="Which checkpoint to load; default: best.")


_AT_HELP = (
    "Each k of the metrics at k, as in 10,20: accuracy@k, hits@k for triples, HR@k, NDCG@k and MRR@k for sequences "
    "(P@20 in papers on sessions is HR@20)"
)


def _parse_at(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    # Python refuses to read an integer of thousands of digits.
    valid = all(part.isdecimal() and len(part) < 20 and int(part) for part in parts)
    if not valid or len(set(map(int, parts))) < len(parts):
        raise UserError(f"`--at` must be different whole numbers, 1 or more, with commas between, got {text!r:.60}")
    return tuple(map(int, parts))


def at_option(group: str, default: str) -> Callable[[F], F]:
    """Return the option of each k that metrics are measured at, kept in a group."""
    shown = f"{_AT_HELP}; default: {default}."
    option: Callable[[F], F] = kept_option(group, "--at", metavar="K,…", parse=_parse_at, help=shown)
    return option


_FORMATS_HELP = "Rows: svmlight, csv, tsv, parquet, npz or npy; default: by the file's ending."
_LABEL_HELP = "Tables: column of the labels; default: label, target, class or y."
_READING = (
    kept_option("source", "--format", help=_FORMATS_HELP),
    kept_option("source", "--label", metavar="COLUMN", help=_LABEL_HELP),
    kept_option("source", "--labels", type=path_argument(), metavar="FILE", help="With .npy: a .npy file of labels."),
)
_SPLIT_HELP = "Text: split into tokens at spaces, or into words; default: spaces."
_MIN_COUNT_HELP = "Text: tokens rarer than this become one class, <unk>."
_HELD_OUT_HELP = "File to evaluate on; all of DATA is trained on. Default: a part of DATA is held out."


def source_options(*, training: bool) -> Callable[[F], F]:
    """Return the options of how to read data; a trained model knows its kind of data and how text is split."""
    if not training:
        return apply(_READING)
    sequences = "DATA has a user, or a session, and an item in each line, or is a folder with train and valid."
    triples = "DATA has triples, or is a folder with train, valid and test."
    return apply(
        (
            click.option("--text", is_flag=True, help="DATA is text, or a folder with train.txt and valid.txt."),
            click.option("--sequences", is_flag=True, help=sequences),
            click.option("--triples", is_flag=True, help=triples),
            kept_option("source", "--held-out", type=path_argument(), metavar="FILE", help=_HELD_OUT_HELP),
            *_READING,
            kept_option("source", "--split", type=click.Choice(["spaces", "words"]), help=_SPLIT_HELP),
            kept_option("source", "--min-count", type=click.IntRange(min=1), help=_MIN_COUNT_HELP),
        )
    )


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
            _check.available_device(name)
