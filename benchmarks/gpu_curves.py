"""Learning curves of Triton's kernels beside those of torch's operators, over several seeds.

    python -m benchmarks.gpu_curves             # into benchmarks/results/gpu_curves.csv
    python -m benchmarks.gpu_curves --check     # also fail if a curve ends outside the spread of the seeds

The problem is planted: an input is the vector of its class plus noise, and an encoder and the class vectors learn it
from new examples in every step. Both implementations start from the same parameters and see the same examples and
draws; they differ in rounding alone. Rows are in float32, in float16, or in bfloat16 rounded at random. The loss is the
exact one on held-out examples, in nats.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import provenance, write_csv
from manyclass import ClassHead
from manyclass.optim import RowAdagrad
from manyclass.samplers import Systematic

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_curves.csv"
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16, rounded at random": torch.bfloat16}
DIM = 64
NOISE = 1.0  # of each number of an input, whose class vector has numbers of this size too
HELD_OUT = 4096
EVALUATIONS = 40
LEARNING_RATE = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Sizes of a training."""

    classes: int
    batch: int
    k: int
    steps: int


def examples(vectors: Tensor, line: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs [n, D] and their classes [n], drawn by the law whose cumulative sum is `line`."""
    place = torch.rand(number, dtype=torch.float64, device=line.device, generator=generator) * line[-1]
    target = torch.searchsorted(line, place).clamp_(max=len(line) - 1)
    noise = torch.randn(number, vectors.shape[1], device=vectors.device, generator=generator)
    return vectors[target] + NOISE * noise, target


def curve(size: Size, precision: str, impl: str, seed: int, device: str) -> list[tuple[int, float]]:
    """Return the held-out loss after some steps."""
    torch.manual_seed(seed)
    dtype = PRECISIONS[precision]
    generator = torch.Generator(device).manual_seed(seed)
    counts = 1 / (torch.arange(size.classes, dtype=torch.float64) + 2)
    line = counts.cumsum(0).to(device)
    vectors = torch.randn(size.classes, DIM, device=device, generator=generator)
    held_out = examples(vectors, line, HELD_OUT, generator)
    encoder = nn.Linear(DIM, DIM, device=device)
    sampler = Systematic(counts, size.k)
    head = ClassHead(DIM, size.classes, sampler=sampler, bias=False, sparse=True, impl=impl, device=device, dtype=dtype)
    rows = RowAdagrad(head.parameters(), LEARNING_RATE, by_row=True, impl=impl, stochastic_rounding=True)
    weights = torch.optim.Adam(encoder.parameters(), 1e-3)
    found = []
    for step in range(1, size.steps + 1):
        inputs, target = examples(vectors, line, size.batch, generator)
        rows.zero_grad()
        weights.zero_grad()
        head(encoder(inputs).to(dtype), target, generator=generator).backward()
        rows.step()
        weights.step()
        if step % max(1, size.steps // EVALUATIONS) == 0:
            with torch.no_grad():
                found.append((step, head.exact_loss(encoder(held_out[0]).to(dtype), held_out[1]).item()))
    return found


def curves(tasks: Sequence[tuple[Size, str, str, int, str]], jobs: int) -> Iterator[list[tuple[int, float]]]:
    """Yield the curve of each task, a number of them computed at a time."""
    if jobs == 1:
        yield from itertools.starmap(curve, tasks)
        return
    # A forked process cannot use the GPU of its parent.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(curve, *zip(*tasks, strict=True))


def differences(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Return for each precision the distance of the mean last losses, and the larger range of a mean over the seeds."""
    last = max(row["step"] for row in rows)
    found = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        ends: dict[str, list[float]] = {}
        for row in rows:
            if row["precision"] == precision and row["step"] == last:
                ends.setdefault(row["impl"], []).append(row["loss"])
        means = [statistics.mean(losses) for losses in ends.values()]
        found.append((precision, max(means) - min(means), max(max(x) - min(x) for x in ends.values())))
    return found


def main() -> int:
    """Run the command line; return 1 if curves are checked and differ by more than the seeds do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--impls", nargs="+", default=["eager", "triton"], help="implementations to compare")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, help="of these alone")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--classes", type=int, default=20_000, help="number of classes")
    parser.add_argument("--batch", type=int, default=1024, help="examples of a step")
    parser.add_argument("--k", type=int, default=512, help="classes drawn in a step")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a training")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, which share the device")
    parser.add_argument("--check", action="store_true", help="fail if a curve ends outside the spread of the seeds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, "gpu_curves: there is no GPU; --device cpu tries the script\n")
    size = Size(arguments.classes, arguments.batch, arguments.k, arguments.steps)
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    rows: list[Row] = []
    trainings = list(itertools.product(arguments.precisions, range(arguments.seeds), arguments.impls))
    tasks = [(size, precision, impl, seed, arguments.device) for precision, seed, impl in trainings]
    for (precision, seed, impl), points in zip(trainings, curves(tasks, arguments.jobs), strict=True):
        about = {"precision": precision, "impl": impl, "seed": seed}
        rows += [{**about, "step": step, "loss": loss, "device": device, **provenance()} for step, loss in points]
        print(f"{precision:30}{impl:10}seed {seed}  last loss {points[-1][1]:.4f}", flush=True)
    write_csv(arguments.out, rows)
    compared = differences(rows)
    for precision, distance, spread in compared:
        print(f"{distance:.4f} nats between the implementations, {spread:.4f} between seeds: {precision}")
    return int(arguments.check and any(not distance <= spread for _, distance, spread in compared))


if __name__ == "__main__":
    sys.exit(main())
