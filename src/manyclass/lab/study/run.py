"""The study of a text from nothing: trainings, errors and times, what follows from them, and the report."""

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

from manyclass import __version__
from manyclass.data import Text
from manyclass.errors import UserError
from manyclass.lab.cells import Cells
from manyclass.lab.files import write_csv, write_text
from manyclass.lab.folder import claim_folder
from manyclass.lab.study.designs import CHOSEN, DESIGNS, PLAIN, available, sizes
from manyclass.lab.study.measures import error, step_times, train_with
from manyclass.lab.study.model import CONTEXT, save
from manyclass.lab.study.numbers import Numbers
from manyclass.lab.study.page import report_of
from manyclass.lab.study.reference import train_exactly
from manyclass.lab.work import Watch, Work
from manyclass.report import check_libraries, write_report

DEFAULT_K = 1024


@dataclass(frozen=True)
class StudyScale:
    """How much work to do.

    Args:
        tokens: to train on, from the beginning of the text; None: all.
        held_out: tokens to evaluate on.
        epochs: of every training.
        seeds: how many of everything but the choice of rates and the times.
        ks: classes scored, where errors and times are measured.
        draws: of each design, where its error is measured.
        rates: of learning, to choose from.
        share: rates are chosen on one pass over the first 1/share of the text.
    """

    tokens: int | None
    held_out: int
    epochs: int
    seeds: int
    ks: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    draws: int = 8
    rates: tuple[float, ...] = (0.025, 0.05, 0.1)
    share: int = 10


QUICK = StudyScale(tokens=30_000, held_out=2_100, epochs=1, seeds=1, ks=(64, 256), draws=4)
DEFAULT = StudyScale(tokens=300_000, held_out=10_000, epochs=2, seeds=1)
FULL = StudyScale(tokens=None, held_out=50_000, epochs=3, seeds=3, draws=32, rates=(0.0125, 0.025, 0.05, 0.1))


@dataclass(frozen=True)
class Done:
    """Where what came out lies, and what it says in short; no page where none was asked for."""

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
    watch: Watch | None = None,
) -> Done:
    """Compare sampling designs on a text. What an earlier run into the folder did is not repeated.

    Args:
        text: what to learn.
        out: a folder that is new, empty, or of an earlier run.
        scale: how much work to do: QUICK, DEFAULT, FULL, or one of your own.
        designs: names of `DESIGNS`; None: all that can run here.
        k: classes scored in trainings; None: one in a hundred.
        seed: the first.
        device: where models are.
        jobs: processes that train at once; seconds are those of one that is alone only with 1. None: 1.
        report: whether to draw the page; without it matplotlib and plotly are not needed.
        watch: is told of progress.

    Raises:
        UserError: the folder cannot be used, or the text is too short.
        ImportError: what draws the report is not installed.
    """
    if report:
        check_libraries()
    names = list(designs or available())
    text = replace(text, train=text.train[: scale.tokens], held_out=text.held_out[: scale.held_out])
    for part, what in ((text.train, "to train on"), (text.held_out, "held out")):
        if len(part) < 2048 + CONTEXT:
            raise UserError(f"`data` must have at least {2048 + CONTEXT:,} tokens {what}, got {len(part):,}")
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
    save(text, folder / f"{digest}.pt")
    cores = len(os.sched_getaffinity(0))
    seeds = range(seed, seed + scale.seeds)
    common = {"text": digest, "device": device}
    given = {"folder": str(folder.resolve())}
    with Cells(folder, jobs=jobs or 1, threads=max(1, cores // (jobs or 1))) as cells:
        work = Work(cells, watch)
        work.begin("rates")
        sweep = [
            {**common, "design": design, "k": k, "rate": rate, "seed": seed, "epochs": 1, "share": scale.share}
            for design in (None, *names)
            for rate in scale.rates
        ]
        rates = _best_rates(sweep, work.map(train_with, sweep, given=given))
        work.begin("exact")
        exact = [{**common, "rate": rates[None], "seed": each, "epochs": scale.epochs} for each in seeds]
        curves = [
            {**cell, "design": "exact", "k": text.num_classes, **result}
            for cell, result in zip(exact, work.map(train_exactly, exact, given=given), strict=True)
        ]
        work.begin("errors")
        asked = [
            {**cell, "design": design, "k": each, "draws": scale.draws}
            for cell in exact
            for design in names
            for each in sizes(design, ks)
        ]
        errors = [{**cell, **result} for cell, result in zip(asked, work.map(error, asked, given=given), strict=True)]
        work.begin("training")
        # What a head does by itself, too.
        usual = [(each, DEFAULT_K) for each in (PLAIN, CHOSEN) if each in names and k < DEFAULT_K < text.num_classes]
        trainings = [
            {
                **common,
                "design": design,
                "k": size,
                "rate": rates[design],
                "seed": each,
                "epochs": scale.epochs,
                "share": 1,
            }
            for each in seeds
            for design, size in (*((name, k) for name in names), *usual)
        ]
        curves += [
            {**cell, **result}
            for cell, result in zip(trainings, work.map(train_with, trainings, given=given), strict=True)
        ]
    with Cells(folder, jobs=1, threads=cores) as alone:
        work = Work(alone, watch)
        work.begin("times")
        contenders = [(design, each) for design in names for each in sizes(design, ks)]
        (timed,) = work.map(step_times, [{**exact[0], "contenders": contenders}], given=given)
    times = [
        {"design": design, "k": each, "step_ms": step, "upkeep_ms": upkeep}
        for (design, each), step, upkeep in zip(timed["contenders"], timed["step_ms"], timed["upkeep_ms"], strict=True)
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
        "errors": [_kept(row) for row in errors],
        "times": times,
        "curves": [_kept(row) for row in curves],
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    return _written(out, results, report=report)


def redraw(out: Path) -> Done:
    """Draw the page of what an earlier run into the folder measured, wherever that ran.

    Raises:
        UserError: there is no such run.
        ImportError: what draws the report is not installed.
    """
    check_libraries()
    try:
        results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise UserError(f"`out` must hold the results.json of a study, got {out}: {problem}") from None
    return _written(out, results, report=True)


def _written(out: Path, results: dict[str, Any], *, report: bool) -> Done:
    numbers = Numbers(results)
    versions = {**results["versions"], "device": results["machine"]["device"], "date": results["date"]}
    write_csv(out / "errors.csv", results["errors"], versions)
    write_csv(out / "times.csv", results["times"], versions)
    write_csv(out / "training.csv", numbers.training_rows(), versions)
    page = write_report(report_of(numbers), out).page if report else None
    return Done(tuple(numbers.summary()), out / "results.json", page)


def _best_rates(cells: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> dict[str | None, float]:
    """For each design the rate of the lowest held-out loss."""
    found: dict[str | None, tuple[float, float]] = {}
    for cell, result in zip(cells, results, strict=True):
        loss = result["loss"][-1]
        if cell["design"] not in found or loss < found[cell["design"]][0]:
            found[cell["design"]] = (loss, cell["rate"])
    return {design: rate for design, (_, rate) in found.items()}


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("text", "device", "draws", "share")}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_designs(names: Sequence[str]) -> None:
    """Raise where a name is of no design.

    Raises:
        UserError: it is not, or the design needs what is not installed.
    """
    for name in names:
        if name not in DESIGNS:
            raise UserError(f"`designs` must be of {'; '.join(DESIGNS)}, got {name!r}")
        if name not in available():
            raise UserError(f"`designs` must be ones that can run here, got {name!r}, which needs faiss")
