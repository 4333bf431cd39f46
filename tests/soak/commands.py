"""Running `manyclass` in a new process, or in this one, which is faster."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from manyclass import cli

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60.0  # after which a command counts as hung
# One thread gives the same sums on every machine, and no thread waits for another.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


@dataclass(frozen=True)
class Ended:
    """The result of a command.

    Args:
        code: its exit code; None: it hung.
        out, err: its output.
    """

    code: int | None
    out: str
    err: str

    def fault(self) -> str:
        """Return the fault, or "": a command must succeed without a warning, or refuse in one line."""
        if self.code is None:
            return f"no end within {LIMIT_SECONDS:.0f} s"
        if "Traceback" in self.err:
            return f"a traceback: {self.err.strip().splitlines()[-1]}"
        if self.code not in (0, 2):
            return f"exit code {self.code}: {self.err[-300:]!r}"
        if self.code == 2 and (not self.err.startswith("manyclass: ") or self.err.count("\n") != 1):
            return f"refused with other than one line: {self.err[-600:]!r}"
        if self.code == 0 and "Warning" in self.err:
            return f"a warning: {self.err[-300:]!r}"
        return ""


class _HungError(BaseException):
    """Raised by the alarm; a BaseException, so that the command does not catch it."""


def called(*arguments: object) -> Ended:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()

    def hung(*_: object) -> None:
        raise _HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        with (
            mock.patch.object(sys, "argv", ["manyclass", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("always")
            for category in _QUIET:
                warnings.simplefilter("ignore", category)
            cli.main()
    except SystemExit as ended:
        return Ended(ended.code if isinstance(ended.code, int) else 1, out.getvalue(), err.getvalue())
    except _HungError:
        return Ended(None, out.getvalue(), err.getvalue())
    except BaseException:
        return Ended(1, out.getvalue(), err.getvalue() + traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    raise AssertionError("the command line ends in an exit")


def started(*arguments: object, ready: bool = False) -> subprocess.Popen[str]:
    """Start a command in a new process.

    Args:
        *arguments: arguments of the command.
        ready: True to print a first line when all is imported: an earlier Ctrl-C has no training to interrupt.
    """
    command = ["-m", "manyclass"]
    if ready:
        command = ["-c", "from manyclass.cli import main; import manyclass.cli.fit; print('ready'); main()"]
    return subprocess.Popen(
        [sys.executable, *command, *map(str, arguments)],
        cwd=ROOT,
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for a process, and kill it if it hangs."""
    try:
        out, err = process.communicate(timeout=4 * LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Ended(None, out, err)
    return Ended(process.returncode, out, err)


def run(*arguments: object) -> Ended:
    """Run a command in a new process."""
    return ended(started(*arguments))
