"""Contenders, each in a process of its own, that take turns: one library's threads and memory are not another's.

This side asks for a number of steps and waits; the other side, `python benchmarks/turns.py`, sleeps until it is asked,
times each step itself and answers with the seconds. Both speak a line of JSON at a time.
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

# OpenMP's threads spin for 4 to 8 ms when they have run out of work; the next turn begins after it.
REST = 0.02


class NotInstalledError(Exception):
    """A peer that this machine does not have."""


class Turns:
    """A contender's process; it is set up when the constructor returns.

    Args:
        build: "module:function" in this folder; the function takes a number of classes, their counts [C] and targets
            [N, B] and returns a step.
        num_classes: C.
        data: a folder with counts.npy and targets.npy.
        environment: of the process, besides this one's.

    Raises:
        NotInstalledError: the contender needs a package that is missing.
        RuntimeError: the process died.
    """

    def __init__(self, build: str, num_classes: int, data: Path, environment: dict[str, str]) -> None:
        self.build = build
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process runs)
        self._process = subprocess.Popen(
            [sys.executable, __file__, build, str(num_classes), str(data)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            ready = self._answer()
            if "missing" in ready:
                raise NotInstalledError(ready["missing"])
        except BaseException:
            self.close()
            raise
        self.setup_s: float = ready["setup_s"]
        self.step_s: float = ready["step_s"]
        self.peak_gib: float = ready["peak_gib"]

    def take(self, untimed: int, timed: int) -> list[float]:
        """Seconds of each timed step of one turn."""
        time.sleep(REST)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([untimed, timed]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_gib = answer["peak_gib"]
        times: list[float] = answer["times"]
        return times

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self.build} ended with {code}:\n{self._errors.read()[-4000:]}")
        return json.loads(line)


def timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def serve(build: str, num_classes: int, data: Path) -> None:
    """The other side."""
    # Answers alone go to stdout: what libraries print goes where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        print(json.dumps({**values, "peak_gib": peak_gib()}), file=answers, flush=True)

    module, function = build.split(":")
    counts, targets = np.load(data / "counts.npy"), np.load(data / "targets.npy")
    start = time.perf_counter()
    try:
        step = getattr(importlib.import_module(f"benchmarks.{module}"), function)(num_classes, counts, targets)
    except ModuleNotFoundError as error:
        # A part of the project that is missing is no peer.
        if error.name is None or error.name.split(".")[0] in ("manyclass", "benchmarks"):
            raise
        answer(missing=error.name)
        return
    # The first step compiles, traces and makes the optimiser's state; the second is like the others.
    step()
    answer(setup_s=time.perf_counter() - start, step_s=timed(step))
    for line in sys.stdin:
        untimed, number = json.loads(line)
        for _ in range(untimed):
            step()
        answer(times=[timed(step) for _ in range(number)])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
