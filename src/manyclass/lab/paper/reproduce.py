"""Runs all experiments, and writes a report with a table of claims, a JSON file and CSV files."""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from manyclass import __version__
from manyclass.lab.cells import Cells
from manyclass.lab.experiment import Claim, Experiment, Findings, Lab, Scale
from manyclass.lab.files import write_csv, write_text
from manyclass.lab.folder import claim_folder
from manyclass.lab.paper import choices, consistency, estimators, margins, methods, signs, variants
from manyclass.lab.problem import BATCH_SIZE, DIM, NUM_CLASSES, NUM_EXAMPLES, K
from manyclass.lab.runner import CellRunner, OnProgress
from manyclass.report import Report, ReportTable, Section, check_libraries, write_report

EXPERIMENTS: dict[str, Experiment] = {
    "methods": methods.run,
    "margins": margins.run,
    "estimators": estimators.run,
    "signs": signs.run,
    "choices": choices.run,
    "consistency": consistency.run,
    "variants": variants.run,
}
QUICK = Scale(seeds=2, iterations=300, short=150, sweep_seeds=1, draws=200)
DEFAULT = Scale(seeds=5, iterations=1000, short=400, sweep_seeds=1, draws=1000)
FULL = Scale(seeds=20, iterations=1000, short=1000, sweep_seeds=5, draws=2000)
PAPER = "Barber & Botev, Dealing with a large number of classes – Likelihood, Discrimination or Ranking?"


@dataclass(frozen=True)
class Reproduction:
    """Claims with their verdicts, and the paths of the report and of the results."""

    claims: tuple[Claim, ...]
    report: Path
    results: Path


def reproduce(
    out: Path,
    *,
    scale: Scale = DEFAULT,
    seed: int = 0,
    only: Sequence[str] | None = None,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
) -> Reproduction:
    """Run the paper's experiments and write the results; cells cached by an earlier run into the folder are reused.

    Args:
        out: a folder that is new, empty, or written by an earlier run.
        scale: the amount of work: QUICK, DEFAULT, FULL, or a custom `Scale`.
        seed: seed of the first problem; the others use the seeds after it.
        only: names of experiments; None means all.
        jobs: worker processes of one thread each; None means one per core.
        on_progress: callback after each cell.

    Raises:
        UserError: the folder is not writable or holds files of another program.
        ImportError: matplotlib or plotly is not installed.
    """
    check_libraries()
    claim_folder(out, "paper")
    chosen = [name for name in EXPERIMENTS if only is None or name in only]
    start = time.perf_counter()
    found: dict[str, Findings] = {}
    seconds: dict[str, float] = {}
    with Cells(out / "cells", jobs=jobs or len(os.sched_getaffinity(0))) as cells:
        runner = CellRunner(cells, on_progress)
        lab = Lab(scale, seed, runner)
        for name in chosen:
            runner.start(name)
            before = time.perf_counter()
            found[name] = EXPERIMENTS[name](lab)
            seconds[name] = round(time.perf_counter() - before, 1)
    claims = tuple(claim for findings in found.values() for claim in findings.claims)
    settings = {**asdict(scale), "seed": seed, "experiments": chosen}
    versions = {"manyclass": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name, findings in found.items():
        write_csv(out / f"{name}.csv", findings.rows, versions)
    results = {
        "paper": PAPER,
        "claims": [asdict(claim) for claim in claims],
        "settings": settings,
        "versions": versions,
        "rows": {name: [_without_seconds(row) for row in findings.rows] for name, findings in found.items()},
        # Only this entry differs between two runs with the same seed.
        "time": {
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "seconds": round(time.perf_counter() - start, 1),
            "experiments": seconds,
        },
    }
    write_text(out / "results.json", json.dumps(results, indent=1, allow_nan=False))
    notes = [
        f"manyclass {versions['manyclass']}, torch {versions['torch']}, Python {versions['python']}; "
        f"{scale.seeds} seeds from {seed}, {scale.iterations:,} iterations, {scale.draws:,} draws.",
        "The folder of this page also holds results.json, a CSV file per experiment, and every figure as PNG and SVG.",
    ]
    written = write_report(_report(found, claims, notes, scale), out)
    return Reproduction(claims, written.page, out / "results.json")


def _report(found: dict[str, Findings], claims: tuple[Claim, ...], notes: list[str], scale: Scale) -> Report:
    table = ReportTable(
        ["claim", "the paper says", "measured", "holds"],
        [
            [
                claim.id,
                claim.statement,
                claim.measured + (f". {claim.reason}" if claim.reason else ""),
                "holds" if claim.holds else "fails",
            ]
            for claim in claims
        ],
        "Measured: median over seeds, with minimum and maximum in brackets. Each verdict is computed from the data.",
        ["good" if claim.holds else "bad" for claim in claims],
    )
    held = sum(claim.holds for claim in claims)
    summary = (
        f"{held} of {len(claims)} claims hold. The paper is {PAPER} Its experiments were repeated with "
        f"{NUM_EXAMPLES:,} examples of {DIM} dimensions, {NUM_CLASSES:,} classes, minibatches of {BATCH_SIZE}, "
        f"K = {K} sampled classes, momentum 0.99, and {scale.seeds} random problems."
    )
    return Report(
        "Dealing with a large number of classes: the paper reproduced",
        summary,
        [Section("Claims", [table]), *(findings.section for findings in found.values())],
        notes,
    )


def _without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "seconds"}
