"""Designs against exact training on real data, with the defaults of `manyclass fit`.

    python benchmarks/designs.py                                     # all, into benchmarks/results/designs.csv
    python benchmarks/designs.py --device cuda --jobs 6 --minutes 9  # six trainings at a time; again, to go on
    python benchmarks/designs.py --sets tmall --designs default exact --seeds 1
    python benchmarks/designs.py --table                             # the rows of the CSV file as a table

Each training is that of `manyclass fit` without further options, except the sampler where a design is pinned (`name`,
or `name:k`), the seed, and the epochs of the novels; `real_data.py` has the data, and says how the best epoch is
chosen. The model of the best epoch is then evaluated on the test part: exact perplexity, and ranks among all classes.
Some columns:

- error: the last error of log Z̃ that the training logged; true_error: the error over whole training batches with the
  best parameters, from 8 batches of 8 draws each.
- seconds: those of training, without evaluations; if several trainings share a device (jobs) they say little.
- decided: the design at the end, with its k; said: warnings and log lines of the training.

Rows are appended as trainings end, and those in the file are not run again. After --minutes no training starts, and
those that run are saved, to be continued by the next call with the same --work folder.
"""

import argparse
import csv
import itertools
import logging
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402
from benchmarks.machine import processor, provenance  # noqa: E402
from benchmarks.real_data import DATA_SETS, DataSet  # noqa: E402
from manyclass import tasks  # noqa: E402
from manyclass.tasks.metrics import rank_metrics  # noqa: E402
from manyclass.training import Batch, Callback, Training, evaluate  # noqa: E402

RESULTS = ROOT / "results" / "designs.csv"
DESIGNS = ("default", "tailored", "exact")
DEFAULT = "default"
TRUE_ERROR_BATCHES = TRUE_ERROR_DRAWS = 8
RATIOS = ("perplexity", "HR@10", "NDCG@10", "MRR", "seconds")  # to those of exact training
KEY = ("data", "design", "seed", "device", "epochs_given")
Row = dict[str, Any]

METRICS = ("HR@10", "NDCG@10", "MRR", "HR@20", "MRR@20")  # P@20 of the literature on sessions is HR@20


@dataclass(frozen=True)
class RunSettings:
    """Settings of one training; epochs None: the default."""

    data: str
    design: str
    seed: int
    epochs: int | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.data}-{self.design.replace(':', '-')}-{self.seed}-{self.epochs or 'default'}"


@dataclass(frozen=True)
class Place:
    """The machine's part in a training: folders, device, threads, trainings at a time, and the time of the end."""

    data: Path
    work: Path
    device: str
    threads: int
    jobs: int
    deadline: float


class Deadline(Callback):
    """A callback that interrupts the training at a time of the system's clock."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def on_step(self, training: Training) -> None:
        """Interrupt the training if it is time; it can be resumed."""
        if time.time() > self._deadline:
            raise KeyboardInterrupt


class Messages(logging.Handler):
    """A log handler that keeps the messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.messages.append(record.getMessage())


def design_settings(design: str, settings: tasks.Settings) -> tasks.Settings:
    """Return the settings of a design: "default", the name of a sampler, or "name:k"."""
    if design == DEFAULT:
        return settings
    name, _, k = design.partition(":")
    return replace(settings, sampler=name, k=int(k) if k else None)


def describe(sampler: object) -> str:
    """Return the names of a sampler and of those it draws with, and the k of the last one."""
    names = []
    while sampler is not None:
        names.append(type(sampler).__name__)
        k = getattr(sampler, "k", None)
        sampler = getattr(sampler, "live", None) or getattr(sampler, "sampler", None)
    return f"{' with '.join(names)}{'' if k is None else f', k = {k:,}'}"


@torch.no_grad()
def true_error(
    head: Any, encoder: nn.Module, batches: Sequence[object], *, draws: int = TRUE_ERROR_DRAWS, seed: int = 0
) -> float:
    """Return the root mean square of log Z̃ − log Z over batches and draws, each made for its whole batch.

    The encoder's dropout is that of training. Both losses have the same target score, so their difference is that of
    log Z̃ and log Z.
    """
    device = next(head.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    modes = head.training, encoder.training
    head.eval()
    encoder.train()
    squares, number = 0.0, 0
    for item in batches:
        batch = Batch.of(item, device)
        present = batch.target >= 0
        hidden, target = encoder(batch.inputs)[present], batch.target[present]
        include = None if batch.include is None else batch.include[present]
        exact = head.exact_loss(hidden, target, reduction="none").double()
        for _ in range(draws):
            loss = head(hidden, target, include=include, reduction="none", generator=generator).double()
            squares += float((loss - exact).square().sum())
            number += len(target)
    head.train(modes[0])
    encoder.train(modes[1])
    return math.sqrt(squares / number)


def train(setting: RunSettings, data: DataSet, place: Place) -> tasks.Fitted:
    """Train as the command does, or continue a training that was stopped."""
    folder = place.work / "runs" / setting.name
    options = tasks.RunOptions(device=place.device, callbacks=[Deadline(place.deadline)])
    settings = replace(design_settings(setting.design, data.settings), seed=setting.seed)
    if setting.epochs is not None:
        settings = replace(settings, epochs=setting.epochs)
    if (folder / "newest.safetensors").exists():
        return tasks.resume(folder, options=options)
    # A training that failed before its first checkpoint starts again.
    shutil.rmtree(folder, ignore_errors=True)
    return tasks.fit(data.kind, data.source, settings, folder, options=options)


def run(setting: RunSettings, place: Place) -> Row | None:
    """Train, evaluate and return a row of results; None if the time was up before."""
    torch.set_num_threads(place.threads)
    log = Messages()
    logging.getLogger("manyclass").addHandler(log)
    logging.getLogger("manyclass").setLevel(logging.INFO)
    data = DATA_SETS[setting.data](place.data, place.work)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = train(setting, data, place)
    logging.getLogger("manyclass").removeHandler(log)
    if fitted.measured is None:
        return None
    model, history, task = fitted.model, fitted.history, tasks.TASKS[data.kind]
    wall = time.perf_counter() - started
    test, summary = task.evaluation_batches(model.spec, data.test)
    found = evaluate(model.head, test, encoder=model.encoder, metrics=rank_metrics(model.head, METRICS))
    with tempfile.TemporaryDirectory(dir=place.work) as folder:
        some = _some(task.read(data.source, model.spec.settings, Path(folder)).train)
    evaluated = [record for record in history.records if record.held_out_loss is not None]
    best = next(record for record in evaluated if record.step == history.best_step)
    lowest = min(evaluated, key=lambda record: record.held_out_loss or math.inf)
    errors = [record.rmse_log_z for record in history.records if record.rmse_log_z is not None]
    return {
        "data": setting.data,
        "design": setting.design,
        "seed": setting.seed,
        "device": device_name(place.device),
        "epochs_given": setting.epochs or "default",
        "classes": model.head.num_classes,
        "test_examples": round(found.examples),
        "perplexity": round(math.exp(found.loss), 3),
        **{name: round(value, 5) for name, value in found.metrics.items()},
        "error": round(errors[-1], 4) if errors else "",
        "true_error": round(true_error(model.head, model.encoder, some), 4),
        "decided": describe(model.head.sampler),
        "epochs": history.progress.epoch,
        "best_epoch": best.epoch,
        "valid_perplexity": round(math.exp(best.held_out_loss or math.nan), 3),
        "lowest_valid_perplexity": round(math.exp(lowest.held_out_loss or math.nan), 3),
        "lowest_at_epoch": lowest.epoch,
        "seconds": round(history.progress.seconds, 2),
        "seconds_to_best": round(best.seconds, 2),
        "steps": history.progress.step,
        "evaluation_seconds": round(history.spent.get("evaluation", 0.0), 2),
        "callback_seconds": round(history.spent.get("callbacks", 0.0), 2),
        "wall_seconds": round(wall, 2),
        "jobs": place.jobs,
        "test": " / ".join(summary),
        "said": " / ".join(dict.fromkeys([*log.messages, *(str(warning.message) for warning in caught)])),
        **provenance(),
    }


def _some(batches: Any) -> list[object]:
    """Return a few batches, spread over the epoch."""
    return list(itertools.islice(batches, 0, None, max(1, len(batches) // TRUE_ERROR_BATCHES)))[:TRUE_ERROR_BATCHES]


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else processor()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the CSV file, none if it does not exist."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path: Path, row: Row) -> None:
    """Append a row to the CSV file."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def ordered(sets: Sequence[str], designs: Sequence[str], seeds: int, epochs: int | None) -> Iterator[RunSettings]:
    """Yield the trainings: all data sets with the first seed first, the designs of a data set next to each other."""
    for seed, data, design in itertools.product(range(seeds), sets, designs):
        yield RunSettings(data, design, seed, epochs)


def run_all(settings: Sequence[RunSettings], place: Place, path: Path) -> int:
    """Run the trainings that have no row, several at a time until the deadline; return how many are left."""
    done = {tuple(str(row[name]) for name in KEY) for row in read_rows(path)}
    device = device_name(place.device)
    left = [s for s in settings if (s.data, s.design, str(s.seed), device, str(s.epochs or "default")) not in done]
    for name in dict.fromkeys(setting.data for setting in left):
        # Files are made here, because two processes must not write the same ones.
        DATA_SETS[name](place.data, place.work)
    # A forked process cannot use the GPU.
    with ProcessPoolExecutor(place.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting, running = list(left), dict[Future[Row | None], RunSettings]()
        while running or (waiting and time.time() < place.deadline):
            while waiting and len(running) < place.jobs and time.time() < place.deadline:
                setting = waiting.pop(0)
                running[pool.submit(run, setting, place)] = setting
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                setting = running.pop(future)
                try:
                    row = future.result()
                except Exception as error:
                    # One design that fails must not take the others' time.
                    print(f"{setting.name}: {type(error).__name__}: {error}", flush=True)
                    continue
                if row is None:
                    print(f"{setting.name}: stopped, to be continued", flush=True)
                    continue
                append(path, row)
                left.remove(setting)
                for file in (place.work / "runs" / setting.name).glob("*.safetensors"):
                    file.unlink()
                print(summary_of(row), flush=True)
    return len(left)


def summary_of(row: Row) -> str:
    """Return a line about a training."""
    values = "  ".join(f"{name} {float(row[name]):.4f}" for name in METRICS)
    return (
        f"{row['data']:12}{row['design']:14} seed {row['seed']}  perplexity {float(row['perplexity']):9.2f}  {values}  "
        f"error {row['error']} (true {row['true_error']})  best epoch {row['best_epoch']}/{row['epochs']}  "
        f"{row['seconds']} s  {row['decided']}"
    )


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table of means over seeds, and of ratios to exact training with the same seeds."""
    names = ["perplexity", *METRICS, "true_error", "seconds"]
    lines = [
        f"| data | device | design | seeds | {' | '.join(names)} "
        f"| {' | '.join(f'{name} / exact' for name in RATIOS)} | decided |",
        "|---" * (len(names) + len(RATIOS) + 5) + "|",
    ]
    for (data, device), found in _grouped(rows, ("data", "device")):
        exact = {row["seed"]: row for row in found if row["design"] == "exact"}
        for (design,), runs in _grouped(found, ("design",)):
            cells = [data, device, design, str(len(runs))]
            cells += [_figure(statistics.mean(float(row[name]) for row in runs)) for name in names]
            paired = [row for row in runs if row["seed"] in exact]
            for name in RATIOS:
                ours = sum(float(row[name]) for row in paired)
                theirs = sum(float(exact[row["seed"]][name]) for row in paired)
                cells.append(f"{ours / theirs:.3f}" if theirs else "–")
            cells.append(", ".join(dict.fromkeys(row["decided"] for row in runs)))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return ((key, [row for row in rows if tuple(row[name] for name in names) == key]) for key in keys)


def _figure(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.4f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--sets", nargs="+", default=list(DATA_SETS), choices=DATA_SETS, help="data sets")
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), metavar="NAME", help="default, or sampler[:k]")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=int, help="epochs (default: those of `manyclass fit`)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="trainings in parallel, each in a separate process")
    parser.add_argument("--threads", type=int, help="threads of each training (default: the cores, shared by the jobs)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time (default: no limit)")
    work = Path(tempfile.gettempdir()) / "manyclass-designs"
    parser.add_argument("--work", type=Path, default=work, help="folder for models and split data")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file")
    parser.add_argument("--table", action="store_true", help="print the rows of the CSV file as a table instead")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read_rows(arguments.out)))
        return
    if not arguments.data.is_dir():
        parser.exit(2, f"designs: {arguments.data} is no folder; set MANYCLASS_DATA or --data\n")
    arguments.work.mkdir(parents=True, exist_ok=True)
    threads = arguments.threads or max(1, (os.cpu_count() or 1) // arguments.jobs)
    deadline = time.time() + 60 * arguments.minutes
    place = Place(arguments.data, arguments.work, arguments.device, threads, arguments.jobs, deadline)
    settings = list(ordered(arguments.sets, arguments.designs, arguments.seeds, arguments.epochs))
    left = run_all(settings, place, arguments.out)
    print(f"{len(settings) - left} of {len(settings)} trainings are in {arguments.out}")


if __name__ == "__main__":
    main()
