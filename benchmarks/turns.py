"""Contenders that take turns, each in a separate process so that libraries share neither threads nor memory.

The parent requests a number of steps and waits. The child, `python benchmarks/turns.py`, sleeps until a request, times
each step and replies with the seconds. Requests and replies are lines of JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.machine import peak_gib  # noqa: E402

# OpenMP threads spin for 4 to 8 ms after their work; the pause lets them stop before the next turn.
PAUSE_SECONDS = 0.02


class NotInstalledError(Exception):
    """A contender's library is not installed."""


class ContenderProcess:
    """Process of a contender; its set-up is complete when the constructor returns.

    Args:
        build: "module:function" in this folder; the function takes the number of classes, their counts [C] and
            targets [N, B], and returns a step.
        num_classes: C.
        data: a folder with counts.npy and targets.npy.
        environment: environment variables to add to those of this process.

    Raises:
        NotInstalledError: the contender needs a package that is not installed.
        RuntimeError: the process ended during set-up.
    """

    def __init__(self, build: str, num_classes: int, data: Path, environment: dict[str, str]) -> None:
        self.build = build
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open while the process runs)
        self._process = subprocess.Popen(
            [sys.executable, __file__, build, str(num_classes), str(data)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            ready = self._reply()
            if "missing" in ready:
                raise NotInstalledError(ready["missing"])
        except BaseException:
            self.close()
            raise
        self.setup_s: float = ready["setup_s"]
        self.step_s: float = ready["step_s"]
        self.peak_gib: float = ready["peak_gib"]

    def run_steps(self, untimed: int, timed: int) -> list[float]:
        """Run one turn and return the seconds of each timed step."""
        time.sleep(PAUSE_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([untimed, timed]) + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        self.peak_gib = reply["peak_gib"]
        times: list[float] = reply["times"]
        return times

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _reply(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self.build} ended with {code}:\n{self._errors.read()[-4000:]}")
        return json.loads(line)


def seconds_of(step: Callable[[], object]) -> float:
    """Time one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def serve(build: str, num_classes: int, data: Path) -> None:
    """Run the child's side: set the contender up, then reply to requests until stdin is closed."""
    # Keep stdout for replies; redirect the libraries' output to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**values: object) -> None:
        print(json.dumps({**values, "peak_gib": peak_gib()}), file=replies, flush=True)

    module, function = build.split(":")
    counts, targets = np.load(data / "counts.npy"), np.load(data / "targets.npy")
    start = time.perf_counter()
    try:
        step = getattr(importlib.import_module(f"benchmarks.{module}"), function)(num_classes, counts, targets)
    except ModuleNotFoundError as error:
        # A missing module of this project is a bug, not a library to install.
        if error.name is None or error.name.split(".")[0] in ("manyclass", "benchmarks"):
            raise
        reply(missing=error.name)
        return
    # The first step compiles, traces and allocates the optimiser's state; the second is like all later ones.
    step()
    reply(setup_s=time.perf_counter() - start, step_s=seconds_of(step))
    for line in sys.stdin:
        untimed, number = json.loads(line)
        for _ in range(untimed):
            step()
        reply(times=[seconds_of(step) for _ in range(number)])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
