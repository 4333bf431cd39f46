"""`manyclass` with some arguments: in a process of its own, or in this one, which is faster."""

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
LIMIT = 60.0  # seconds: what takes longer hangs
# The same sums on every machine, and no thread that waits for another.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        code: its exit code; None: it hung.
        out, err: what it wrote.
    """

    code: int | None
    out: str
    err: str

    def fault(self) -> str:
        """What is wrong with it: it must be right, or refused in one line. "" for nothing."""
        if self.code is None:
            return f"no end within {LIMIT:.0f} s"
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
    """Nothing catches it but who set the alarm."""


def called(*arguments: object) -> Ended:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()

    def hung(*_: object) -> None:
        raise _HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
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
    """The command in a process of its own.

    Args:
        arguments: of the command.
        ready: whether it says so, in its first line, when all is imported: Ctrl-C before has nothing to go on from.
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
    """Wait for a process; one that hangs is killed."""
    try:
        out, err = process.communicate(timeout=4 * LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Ended(None, out, err)
    return Ended(process.returncode, out, err)


def run(*arguments: object) -> Ended:
    """The command in a process of its own, to its end."""
    return ended(started(*arguments))
