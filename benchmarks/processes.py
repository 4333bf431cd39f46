"""A whole training by `manyclass fit` on one process and on several: quality, time, and the memory of each process.

    python -m benchmarks.processes                                  # WikiText-2, into benchmarks/results/processes.csv
    python -m benchmarks.processes --epochs 1 --ranks 1 2 --data text.txt    # printed only

All trainings take the same steps: the batch is the joint one, of which each process takes a share. Every process has
one thread and its core, as far as this machine has cores; those of one process are timed with one thread too. Memory is
the largest that a process held, with Python and torch; `import_gib` is that of a process which has imported them.
"""

import argparse
import csv
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.counts import DATA
from benchmarks.machine import provenance, write_csv

RESULTS = Path(__file__).resolve().parent / "results" / "processes.csv"
POLL_SECONDS = 0.2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
Row = dict[str, Any]


def peaks_of(command: Sequence[str], ranks: int) -> list[float]:
    """Run a command, and return the largest memory in GiB of each process that trains."""
    process = subprocess.Popen(command, env=ENVIRONMENT)
    peaks: dict[int, float] = {}
    while process.poll() is None:
        for pid in [process.pid] if ranks == 1 else children(process.pid):
            peaks[pid] = max(peaks.get(pid, 0.0), peak_gib(pid))
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [peaks[pid] for pid in sorted(peaks)]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def peak_gib(pid: int) -> float:
    """Return the largest memory that a process has held; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("VmHWM")), 0.0)


def import_gib() -> float:
    """Return the memory of a process that has imported what a training needs."""
    command = [sys.executable, "-c", "import manyclass.cli.fit, manyclass.tasks, time; time.sleep(2)"]
    (peak,) = peaks_of(command, 1)
    return peak


def train(ranks: int, arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """Train on a number of processes; return a row for each epoch."""
    out = folder / f"model-{ranks}"
    launcher = ["-m"] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    options = ["--epochs", arguments.epochs, "--seed", arguments.seed, "--no-report", *shlex.split(arguments.options)]
    command = [sys.executable, *launcher, "manyclass", "fit", arguments.data, "--text", "--out", out, *options]
    peaks = peaks_of([str(part) for part in command], ranks)
    with (out / "log.csv").open() as file:
        log = [row for row in csv.DictReader(file) if row["held_out_loss"]]
    return [
        {
            "data": arguments.data.name,
            "options": arguments.options,
            "seed": arguments.seed,
            "ranks": ranks,
            "epoch": row["epoch"],
            "step": row["step"],
            "seconds": round(float(row["seconds"]), 1),
            "held_out_loss": round(float(row["held_out_loss"]), 4),
            "peak_gib_by_rank": " ".join(f"{peak:.2f}" for peak in peaks),
        }
        for row in log
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "wikitext-2", help="text, or a folder with its parts")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of processes")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each training")
    parser.add_argument("--seed", type=int, default=0, help="seed of all trainings")
    parser.add_argument("--options", default="--sampler learned --k 1024", help="further options of fit")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/processes.csv, if nothing is given)")
    arguments = parser.parse_args()
    if not arguments.data.exists():
        parser.exit(2, f"processes: there is no {arguments.data}; set MANYCLASS_DATA or give --data\n")
    rows: list[Row] = []
    imported = round(import_gib(), 2)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in arguments.ranks:
            rows += train(ranks, arguments, Path(folder))
    for row in rows:
        row |= {"import_gib": imported, **provenance()}
        print(
            f"{row['ranks']} processes, epoch {row['epoch']}: held-out loss {row['held_out_loss']}, "
            f"{row['seconds']:,} s, {row['peak_gib_by_rank']} GiB at most"
        )
    out = arguments.out or (RESULTS if len(sys.argv) == 1 else None)
    if out is not None:
        write_csv(out, rows)
        print(f"{len(rows)} rows are in {out}")


if __name__ == "__main__":
    sys.exit(main())
