"""Trainings that take a few seconds, and their results."""

import csv
import functools
import random
import time
from dataclasses import dataclass
from pathlib import Path

from manyclass import storage
from manyclass.tasks.fit import SPOOL_FOLDER as DATA
from tests.soak.commands import ended, started
from tests.training.killed import timeless

# More than 1,024 classes, so that a step samples; the sampler is rebuilt from step 50 on.
_COMMON = ("--k", 64, "--evaluate-every", 37, "--probe-every", 50, "--checkpoint-every", 0.05)
_OWN = {
    "text": ("--text", "--dim", 16, "--batch-size", 4, "--length", 16, "--clip", 1.0),
    "features": ("--hidden", 16, "--batch-size", 24),
}


@dataclass(frozen=True)
class Reference:
    """An uninterrupted training.

    Args:
        left: its results, without times.
        begun: seconds from its start to its first checkpoint.
        trained: seconds until training and evaluation were done.
        seconds: seconds until its end.
        last_step: the number of the last step.
        data: its training data.
        report: True if it wrote a report.
    """

    left: list[object]
    begun: float
    trained: float
    seconds: float
    last_step: int
    data: Path
    report: bool

    def files(self) -> set[str]:
        """Return the names of all files it left."""
        page = {"report.html", "figures"} if self.report else set()
        names = ("best", "newest", "previous")
        return {*(f"{name}.safetensors" for name in names), "fit.json", "log.csv", *page}

    def resume(self, out: Path) -> tuple[object, ...]:
        """Return the arguments that resume another training."""
        return ("fit", "--out", out, "--resume", *(() if self.report else ("--no-report",)))


def write_data(kind: str, path: Path) -> Path:
    """Write a small data set of about 1,300 classes, some frequent and most rare."""
    draw = random.Random(7)
    with path.open("w") as file:
        for i in range({"text": 1300, "features": 3600}[kind]):
            # Each class occurs once; then some more often than others.
            c = i if i < 1300 else int(1300 * draw.random() ** 3)
            if kind == "text":
                print(f"w{c}", *(f"w{int(1300 * draw.random() ** 3)}" for _ in range(6)), file=file)
            else:
                columns = sorted({1 + (7 * c + draw.randrange(5)) % 60 for _ in range(4)})
                print(f"c{c}", *(f"{column}:{draw.random():.3f}" for column in columns), file=file)
    return path


def fit_command(kind: str, data: Path, out: Path, *, report: bool) -> tuple[object, ...]:
    """Return the arguments of a training."""
    shorter = ("--epochs", 2) if report else ("--epochs", 1, "--no-report")
    return ("fit", data, "--out", out, *_OWN[kind], *_COMMON, *shorter)


@functools.cache
def reference(kind: str, folder: Path, report: bool) -> Reference:
    """Run an uninterrupted training of a data set in a folder."""
    data = write_data(kind, folder / f"{kind}.txt")
    out = folder / f"{kind}-whole"
    begin = time.monotonic()
    process = started(*fit_command(kind, data, out, report=report))
    # The data folder is removed after the evaluation; then the report is drawn.
    begun = trained = begin
    while process.poll() is None:
        if (out / DATA).exists():
            trained = time.monotonic()
            begun = begun if (out / "newest.safetensors").exists() else trained
        time.sleep(0.005)
    done = ended(process)
    seconds = time.monotonic() - begin
    assert done.code == 0, f"a training that was not stopped ended with {done.code}: {done.err}"
    return Reference(left(out), begun - begin, trained - begin, seconds, int(rows(out)[-1][0]), data, report)


def left(out: Path) -> list[object]:
    """Return the results of a training that must be equal."""
    newest = storage.load(out / "newest.safetensors", content_type="checkpoint")
    best = storage.load(out / "best.safetensors", content_type="model")
    return [timeless(newest["state"]), newest["best_cost"], best, rows(out)]


def rows(out: Path) -> list[list[str]]:
    """Return the rows of the log without times."""
    with (out / "log.csv").open() as file:
        first, *others = csv.reader(file)
    at = first.index("seconds")
    return [row[:at] + row[at + 1 :] for row in others]
