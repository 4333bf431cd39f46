"""Runs the study of a text: trainings, errors, step times, and the report."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from manyclass import __version__, defaults
from manyclass.data import Text
from manyclass.errors import UserError
from manyclass.lab.cells import Cells
from manyclass.lab.files import write_csv, write_text
from manyclass.lab.folder import claim_folder
from manyclass.lab.runner import CellRunner, OnProgress
from manyclass.lab.study.analysis import Analysis
from manyclass.lab.study.designs import DEFAULT_DESIGN, DESIGNS, SYSTEMATIC_DESIGN, measured_ks
from manyclass.lab.study.measures import design_error, step_times, train_design
from manyclass.lab.study.model import CONTEXT, save_text
from manyclass.lab.study.page import report_of
from manyclass.lab.study.reference import train_exactly
from manyclass.report import check_libraries, write_report


@dataclass(frozen=True)
class StudyScale:
    """Amount of work.

    Args:
        tokens: training tokens, from the start of the text; None means all.
        held_out: tokens to evaluate on.
        epochs: epochs of every training.
        seeds: number of seeds for trainings and errors; learning rates and times use the first.
        ks: values of k, the classes scored, at which errors and times are measured.
        draws: draws per measured error.
        rates: learning rates to choose from.
        parts: learning rates are chosen on one pass over the first of this many equal parts of the text.
    """

    tokens: int | None
    held_out: int
    epochs: int
    seeds: int
    ks: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    draws: int = 8
    rates: tuple[float, ...] = (0.025, 0.05, 0.1)
    parts: int = 10


QUICK = StudyScale(tokens=30_000, held_out=2_100, epochs=1, seeds=1, ks=(64, 256), draws=4)
DEFAULT = StudyScale(tokens=300_000, held_out=10_000, epochs=2, seeds=1)
FULL = StudyScale(tokens=None, held_out=50_000, epochs=3, seeds=3, draws=32, rates=(0.0125, 0.025, 0.05, 0.1))


@dataclass(frozen=True)
class StudyResult:
    """Summary sentences, the path of results.json, and the page's path unless `report` was False."""

    summary: tuple[str, ...]
    results: Path
    page: Path | None


def study(
    text: Text,
    out: Path,
    *,
    scale: StudyScale = DEFAULT,
    designs: Sequence[str] | None = None,
    k: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    jobs: int | None = None,
    report: bool = True,
    on_progress: OnProgress | None = None,
) -> StudyResult:
    """Compare sampling designs on a text; cells cached by an earlier run into the folder are reused.

    Args:
        text: the training and held-out text.
        out: a folder that is new, empty, or written by an earlier run.
        scale: the amount of work: QUICK, DEFAULT, FULL, or a custom `StudyScale`.
        designs: keys of `DESIGNS`; None means all with their libraries installed.
        k: classes scored in trainings; None means one in a hundred.
        seed: the first seed.
        device: torch device of the models.
        jobs: trainings in parallel, None means 1; with more, training seconds include the contention.
        report: True to draw the page, which needs matplotlib and plotly.
        on_progress: callback after each cell.

    Raises:
        UserError: the folder is not writable or holds files of another program, the text has too few tokens or
            classes, or `k` is more than half of the classes.
        ImportError: `report` is True, and matplotlib or plotly is not installed.
    """
    if report:
        check_libraries()
    names = list(designs or DESIGNS)
    text = replace(text, train=text.train[: scale.tokens], held_out=text.held_out[: scale.held_out])
    for part, use in ((text.train, "to train on"), (text.held_out, "held out")):
        if len(part) < 2048 + CONTEXT:
            raise UserError(f"`data` must have at least {2048 + CONTEXT:,} tokens {use}, got {len(part):,}")
    k = k or max(8, text.num_classes // 100)
    if k > text.num_classes // 2:
        raise UserError(f"`k` must be at most half of the {text.num_classes:,} classes, got {k:,}")
    ks = [each for each in scale.ks if each <= text.num_classes // 2]
    if not ks:
        raise UserError(f"`data` must have at least {2 * min(scale.ks)} classes, got {text.num_classes:,}")
    claim_folder(out, "study")
    started = time.perf_counter()
    folder = out / "cells"
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(text.train.numpy().tobytes() + text.held_out.numpy().tobytes()).hexdigest()[:12]
    save_text(text, folder / f"{digest}.pt")
    cores = len(os.sched_getaffinity(0))
    seeds = range(seed, seed + scale.seeds)
    common = {"text": digest, "device": device}
    unkeyed = {"folder": str(folder.resolve())}
    with Cells(folder, jobs=jobs or 1, threads=max(1, cores // (jobs or 1))) as cells:
        runner = CellRunner(cells, on_progress)
        runner.start("rates")
        sweep = [
            {**common, "design": design, "k": k, "rate": rate, "seed": seed, "epochs": 1, "parts": scale.parts}
            for design in (None, *names)
            for rate in scale.rates
        ]
        rates = _best_rates(sweep, runner.map(train_design, sweep, unkeyed=unkeyed))
        runner.start("exact")
        exact = [{**common, "rate": rates[None], "seed": each, "epochs": scale.epochs} for each in seeds]
        curves = [
            {**cell, "design": "exact", "k": text.num_classes, **result}
            for cell, result in zip(exact, runner.map(train_exactly, exact, unkeyed=unkeyed), strict=True)
        ]
        runner.start("errors")
        error_cells = [
            {**cell, "design": design, "k": each, "draws": scale.draws}
            for cell in exact
            for design in names
            for each in measured_ks(design, ks)
        ]
        found = runner.map(design_error, error_cells, unkeyed=unkeyed)
        errors = [{**cell, **result} for cell, result in zip(error_cells, found, strict=True)]
        runner.start("training")
        # Train the two main designs also with the k that a head has by default.
        usual = [
            (each, defaults.K)
            for each in (SYSTEMATIC_DESIGN, DEFAULT_DESIGN)
            if each in names and k < defaults.K < text.num_classes
        ]
        trainings = [
            {**common, "design": design, "k": size, "rate": rates[design], "seed": each}
            | {"epochs": scale.epochs, "parts": 1}
            for each in seeds
            for design, size in (*((name, k) for name in names), *usual)
        ]
        curves += [
            {**cell, **result}
            for cell, result in zip(trainings, runner.map(train_design, trainings, unkeyed=unkeyed), strict=True)
        ]
    with Cells(folder, jobs=1, threads=cores) as alone:
        runner = CellRunner(alone, on_progress)
        runner.start("times")
        contenders = [(design, each) for design in names for each in measured_ks(design, ks)]
        (timed,) = runner.map(step_times, [{**exact[0], "contenders": contenders}], unkeyed=unkeyed)
    times = [
        {"design": design, "k": each, "step_ms": step, "rebuild_ms": build}
        for (design, each), step, build in zip(timed["contenders"], timed["step_ms"], timed["rebuild_ms"], strict=True)
    ]
    results = {
        "text": {
            "source": text.source,
            "classes": text.num_classes,
            "train_tokens": len(text.train),
            "held_out_tokens": len(text.held_out),
        },
        "settings": {**asdict(scale), "designs": names, "k": k, "seed": seed, "device": device, "jobs": jobs or 1},
        "rates": {name or "exact": rate for name, rate in rates.items()},
        "machine": {
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else _processor(),
            "cores": cores,
            "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE") == "1",
            "gflops": timed["gflops"],
        },
        "versions": {"manyclass": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "errors": [_result_row(row) for row in errors],
        "times": times,
        "curves": [_result_row(row) for row in curves],
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    return _write(out, results, report=report)


def redraw(out: Path) -> StudyResult:
    """Draw the page again from the folder's results.json, which may come from another machine.

    Raises:
        UserError: the folder has no readable results.json.
        ImportError: matplotlib or plotly is not installed.
    """
    check_libraries()
    try:
        results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise UserError(f"`out` must hold the results.json of a study, got {out}: {problem}") from None
    return _write(out, results, report=True)


def _write(out: Path, results: dict[str, Any], *, report: bool) -> StudyResult:
    analysis = Analysis(results)
    versions = {**results["versions"], "device": results["machine"]["device"], "date": results["date"]}
    write_csv(out / "errors.csv", results["errors"], versions)
    write_csv(out / "times.csv", results["times"], versions)
    write_csv(out / "training.csv", analysis.training_rows(), versions)
    page = write_report(report_of(analysis), out).page if report else None
    return StudyResult(tuple(analysis.summary()), out / "results.json", page)


def _best_rates(cells: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> dict[str | None, float]:
    """Return, per design, the learning rate with the lowest held-out loss."""
    found: dict[str | None, tuple[float, float]] = {}
    for cell, result in zip(cells, results, strict=True):
        loss = result["loss"][-1]
        if cell["design"] not in found or loss < found[cell["design"]][0]:
            found[cell["design"]] = (loss, cell["rate"])
    return {design: rate for design, (_, rate) in found.items()}


def _result_row(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("text", "device", "draws", "parts")}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_designs(names: Sequence[str]) -> None:
    """Check the names of designs.

    Raises:
        UserError: a name is not a key of `DESIGNS`.
    """
    for name in names:
        if name not in DESIGNS:
            raise UserError(f"`designs` must be of {'; '.join(DESIGNS)}, got {name!r}")
