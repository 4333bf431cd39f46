"""The group of commands, and the handling of errors."""

import errno
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
from manyclass.cli.launch import number_of_processes, report_failure, this_rank
from manyclass.errors import Notice, UserError

# In the order that a newcomer needs them. A command is a function in the module of the same name, imported when the
# command is called, because torch takes a second or two to import.
COMMANDS = {
    "demo": "Train on Python source code, sampled and exact.",
    "fit": "Train a model on a file and save it in a folder.",
    "evaluate": "Evaluate a model on a file.",
    "predict": "Predict the most probable classes of each example in a file.",
    "info": "Show a model and the checkpoints in its folder.",
    "study": "Compare sampling designs on a text.",
    "paper": "Reproduce the paper, each claim beside its evidence.",
}

_ON_SEVERAL_PROCESSES = ("fit", "evaluate")

# The reader of a pipe is gone; the disk is full; it failed. Other system errors are bugs.
_OUTPUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _Commands(click.Group):
    """A group that imports a command when it is called."""

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
            # The reader of the pipe is gone. Here, since click would exit with 1.
            _discard_output()
            return 0


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Train, evaluate and use probabilistic classifiers over very many classes."""
    if number_of_processes() > 1 and context.invoked_subcommand not in _ON_SEVERAL_PROCESSES:
        raise UserError(
            f"`{context.invoked_subcommand}` must be run by one process, got {number_of_processes()} by torchrun"
        )


@contextmanager
def _one_line_notices() -> Iterator[None]:
    """Print notices as one line, as errors are; other warnings are bugs and keep their origin."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, Notice) and this_rank() > 0:
                # The first process prints the same.
                return
            if issubclass(category, Notice):
                # This overwrites a progress line, which is printed again.
                erase = "\r\x1b[K" if sys.stderr.isatty() else ""
                print(f"{erase}manyclass: {message}", file=sys.stderr, flush=True)
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = shown
        yield


def main() -> None:
    """Run the command line: an error that a user can fix is one line and exit code 2; a bug keeps its traceback."""
    end_quietly()
    if sys.stdout is None:  # It was closed by the shell.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code, message = _run()
    except KeyboardInterrupt:
        # Ctrl-C was pressed again while the first one was handled.
        code, message = 2, "interrupted"
    with uninterrupted(ignore=True):
        if message:
            name = f"manyclass, rank {this_rank()}: " if this_rank() else "manyclass: "
            print(name + textwrap.shorten(message, 500), file=sys.stderr)
            report_failure(message)
        raise SystemExit(code)


def _run() -> tuple[int, str]:
    """Run the command and flush its output; return its exit code and the message to end with."""
    try:
        ended = _command()
        sys.stdout.flush()
        return ended
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        if isinstance(error, BrokenPipeError):
            return 0, ""
        return 2, f"cannot write the output: {error.strerror}"


def _discard_output() -> None:
    """Send the rest of the output, which Python flushes at exit, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command() -> tuple[int, str]:
    try:
        with _one_line_notices(), terminated_as_interrupted():
            return app(standalone_mode=False) or 0, ""
    except UserError as error:
        return 2, str(error)
    except click.ClickException as error:
        return 2, error.format_message()
    except (click.Abort, KeyboardInterrupt):
        return 2, "interrupted"
