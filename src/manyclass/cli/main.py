"""All commands, and what becomes of errors."""

import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from manyclass import __version__
from manyclass.cli.interrupts import end_quietly, terminated_as_interrupted, uninterrupted
from manyclass.errors import Notice, UserError

# In the order that a newcomer meets them. Each is the function of its name in the module of its name, which is imported
# when it is called: torch takes a second or two.
COMMANDS = {
    "demo": "Train on the Python source of this machine, sampled and exact.",
    "fit": "Train a model of a file, and keep it in a folder.",
    "evaluate": "Measure a model on a file it was not trained on.",
    "predict": "The most probable classes of each example of a file.",
    "info": "What a model is, and what is in its folder.",
    "study": "Compare sampling designs on a text.",
    "paper": "Reproduce the paper, each claim beside its evidence.",
}


class _Commands(click.Group):
    """Imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        with uninterrupted():
            found: click.Command = getattr(importlib.import_module(f"manyclass.cli.{name}"), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Whoever read the answers has enough of them. Python would flush what is left when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """Probabilistic classifiers over very many classes: train, evaluate, predict, and see what sampling costs."""


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show notices as errors are shown; other warnings are bugs, and keep where they come from."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, Notice):
                # A progress line is written over: it comes again.
                over = "\r\x1b[K" if sys.stderr.isatty() else ""
                print(f"{over}manyclass: {message}", file=sys.stderr, flush=True)
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = shown
        yield


def main() -> None:
    """Run the command line: what a user can mend is one line, and exit code 2; a bug keeps its traceback."""
    end_quietly()
    try:
        code, message = _called()
    except KeyboardInterrupt:
        # Pressed once more while it was answered.
        code, message = 2, "interrupted"
    with uninterrupted(forget=True):
        if message:
            print("manyclass: " + textwrap.shorten(message, 500), file=sys.stderr)
        raise SystemExit(code)


def _called() -> tuple[int, str]:
    """The exit code of the command that was given, and what to say at the end."""
    try:
        with _warnings_in_a_line(), terminated_as_interrupted():
            return app(standalone_mode=False) or 0, ""
    except UserError as error:
        return 2, str(error)
    except click.ClickException as error:
        return 2, error.format_message()
    except (click.Abort, KeyboardInterrupt):
        return 2, "interrupted"
