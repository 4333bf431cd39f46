"""Cost of each sampling design from 10⁴ to 10⁷ classes: set-up, steps, rebuilds and memory.

    python benchmarks/design_cost.py                       # the whole table, into benchmarks/results/design_cost.csv
    python benchmarks/design_cost.py --classes 1e4 1e5     # a part of it, printed only

A step draws for a batch of 1024, scores k = 256 classes of 64 dimensions, computes gradients and updates the scored
rows by `RowAdagrad`; counts follow Zipf's law, targets are drawn by them. Each design has a separate process. Those
that fit into memory together take turns, with the matrix products that every step needs among them.

Some designs periodically rebuild a table, clusters or an index. No step in the turns includes a rebuild. Rebuilds
are timed in a second process, together with their peak memory, and their time is divided by the default number of steps
between rebuilds. Set-up is the sampler with its first draw, without the class table. Memory is the peak beyond
the class table and Adagrad's state. All with huge pages (THP_MEM_ALLOC_ENABLE=1).
"""

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyclass import ClassHead
from manyclass.lab.study.rebuilds import rebuild_jobs
from manyclass.optim import RowAdagrad
from manyclass.samplers import (
    Bernoulli,
    Clustered,
    Importance,
    InBatch,
    Learned,
    Sampler,
    Systematic,
    Tailored,
)

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import zipf_counts  # noqa: E402
from benchmarks.machine import free_gib, provenance, quantiles, write_csv  # noqa: E402
from benchmarks.turns import ContenderProcess, NotInstalledError  # noqa: E402

RESULTS = ROOT / "results" / "design_cost.csv"
BATCH_SIZE, K, DIM, GROUP_SIZE = 1024, 256, 64, 32
LEARNING_RATE = 0.01
SIZES = [10**4, 10**5, 10**6, 10**7]
NUM_BATCHES = 16
ROUNDS, WARM_UP_STEPS, TIMED_STEPS = 10, 3, 10
SLOW_BUILD_SECONDS = 1.0  # a slower build is timed once, not three times
NO_REBUILD = 1 << 40  # steps between rebuilds, more than any run has
FLOOR = "products"

Row = dict[str, object]


@dataclass(frozen=True)
class Design:
    """Sampling design to measure.

    Args:
        build: returns the sampler for class counts.
        every: functions of the number of classes: default steps between two runs of each of its `rebuild_jobs`.
        tables: tables [C, D] that it holds temporarily.
    """

    build: Callable[[Tensor], Sampler]
    every: tuple[Callable[[int], int], ...] = ()
    tables: float = 0.5

    def gib(self, num_classes: int) -> float:
        """Estimate the peak memory; weights and Adagrad's state are two more tables."""
        return 0.5 + (2 + self.tables) * num_classes * DIM * 4 / 2**30


def learned_interval(num_classes: int) -> int:
    """Return the default steps between rebuilds of `Learned`."""
    return max(50, math.isqrt(num_classes))


def cluster_interval(num_classes: int) -> int:
    """Return the default steps between rebuilds of `Clustered`."""
    return max(500, num_classes // 64)


def order_interval(num_classes: int) -> int:
    """Return the steps in which an order by clusters revisits all classes."""
    return -(-num_classes // 64)


DESIGNS = {
    "importance": Design(lambda counts: Importance(counts, K)),
    "bernoulli": Design(lambda counts: Bernoulli(counts, K)),
    "bernoulli, proportional": Design(lambda counts: Bernoulli.proportional(counts, K)),
    "systematic": Design(lambda counts: Systematic(counts, K)),
    "systematic, stratified": Design(lambda counts: Systematic(counts, K, stratified=True)),
    "learned": Design(lambda counts: Learned(counts, K, every=NO_REBUILD), (learned_interval,)),
    "learned, by cluster": Design(
        lambda counts: Learned(counts, K, every=NO_REBUILD, order="cluster"), (learned_interval, *[order_interval] * 2)
    ),
    "clustered": Design(
        lambda counts: Clustered(counts, K, group_size=GROUP_SIZE, every=NO_REBUILD), (cluster_interval,), 2.0
    ),
    "tailored": Design(lambda counts: Tailored(counts, K, every=NO_REBUILD), (), 1.0),
    "in batch": Design(lambda counts: InBatch(counts, K)),
}


def products(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Callable[[], object]:
    """Return the floor: only the matrix products of a step."""
    hidden, rows, gamma = torch.randn(BATCH_SIZE, DIM), torch.randn(K, DIM), torch.randn(BATCH_SIZE, K)

    def step() -> None:
        hidden @ rows.T
        gamma @ rows
        gamma.T @ hidden

    return step


def steps(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Callable[[], object]:
    """Return a whole step of the design named by the environment variable DESIGN."""
    weights = torch.from_numpy(counts)
    sampler = DESIGNS[os.environ["DESIGN"]].build(weights)
    head = ClassHead(DIM, num_classes, counts=weights, sampler=sampler, sparse=True)
    optimizer = RowAdagrad(head.parameters(), LEARNING_RATE)
    hidden = torch.randn(BATCH_SIZE, DIM, requires_grad=True)
    batches = itertools.cycle(torch.from_numpy(targets))

    def step() -> None:
        hidden.grad = None
        optimizer.zero_grad()
        head(hidden, next(batches)).backward()
        optimizer.step()

    return step


def builds(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Callable[[], object]:
    """Return a function that first makes class vectors, then sets the design up, then rebuilds it in parts."""

    def phases() -> Iterator[None]:
        bound = 1 / math.sqrt(DIM)
        vectors = torch.empty(num_classes, DIM).uniform_(-bound, bound)
        hidden, target = torch.randn(BATCH_SIZE, DIM), torch.from_numpy(targets[0])
        yield
        sampler = DESIGNS[os.environ["DESIGN"]].build(torch.from_numpy(counts))
        sampler.attach(vectors)
        sampler(target, hidden=hidden)
        for run, _ in itertools.cycle(rebuild_jobs(sampler)):
            yield
            run()
        while True:
            yield

    return phases().__next__


@dataclass(frozen=True)
class DesignCost:
    """Measurements of a design."""

    times: list[float]
    floor: float
    setup_s: float
    rebuild_s: tuple[float, ...]
    beyond_gib: float


def groups(names: list[str], num_classes: int, budget: float) -> Iterator[list[str]]:
    """Yield groups of designs that fit into memory together."""
    group: list[str] = []
    for name in names:
        if group and sum(DESIGNS[member].gib(num_classes) for member in (*group, name)) > budget:
            yield group
            group = []
        group.append(name)
    yield group


def measure(group: list[str], num_classes: int, rounds: int, data: Path) -> dict[str, DesignCost | str]:
    """Time the designs of a group in turn; a string says why a design could not run."""
    environment = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    table = num_classes * (DIM + 1) * 4 / 2**30
    found: dict[str, DesignCost | str] = {}
    turns: dict[str, ContenderProcess] = {}
    with ExitStack() as stack:
        turns[FLOOR] = floor = ContenderProcess("design_cost:products", num_classes, data, environment)
        stack.callback(floor.close)
        for name in group:
            try:
                turns[name] = ContenderProcess("design_cost:steps", num_classes, data, environment | {"DESIGN": name})
                stack.callback(turns[name].close)
            except (NotInstalledError, RuntimeError) as error:
                found[name] = failure_note(error)
        times: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(rounds):
            for name, turn in turns.items():
                times[name] += turn.run_steps(untimed=WARM_UP_STEPS, timed=TIMED_STEPS)
    median = statistics.median(times[FLOOR])
    del turns[FLOOR]
    for name, turn in turns.items():
        try:
            setup, rebuild, peak = measure_builds(name, num_classes, data, environment)
        except RuntimeError as error:
            found[name] = failure_note(error)
            continue
        # Subtract the memory of a process that only multiplies matrices: Python, torch, the counts.
        beyond = max(turn.peak_gib - 2 * table, peak - table) - floor.peak_gib
        found[name] = DesignCost(times[name], median, setup, rebuild, max(0.0, beyond))
    return found


def measure_builds(
    name: str, num_classes: int, data: Path, environment: dict[str, str]
) -> tuple[float, tuple[float, ...], float]:
    """Measure seconds of set-up and of each part of a rebuild, and the peak in GiB, with no other process running."""
    turn = ContenderProcess("design_cost:builds", num_classes, data, environment | {"DESIGN": name})
    try:
        parts = len(DESIGNS[name].every)
        times = turn.run_steps(untimed=0, timed=parts * (1 if turn.step_s > SLOW_BUILD_SECONDS else 3)) if parts else []
        return turn.step_s, tuple(statistics.median(times[i::parts]) for i in range(parts)), turn.peak_gib
    finally:
        turn.close()


def failure_note(error: Exception) -> str:
    """Return the note for a design that misses a library or ran out of memory."""
    if isinstance(error, NotInstalledError):
        return f"not installed: {error}"
    print(f"\n{error}", file=sys.stderr)
    return str(error).splitlines()[0].rstrip(":")


def run(names: list[str], num_classes: int, rounds: int, budget: float) -> list[Row]:
    """Return the rows of one size."""
    counts, law = zipf_counts(num_classes)
    draw = Importance(counts, NUM_BATCHES * BATCH_SIZE)
    drawn = draw(torch.zeros(1, dtype=torch.int64), generator=torch.Generator().manual_seed(0)).ids()
    measured: dict[str, DesignCost | str] = {}
    fitting = []
    for name in names:
        gib = DESIGNS[name].gib(num_classes)
        if gib <= budget:
            fitting.append(name)
        else:
            measured[name] = f"would need {gib:.0f} GiB"
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "counts.npy", counts.numpy())
        np.save(Path(folder) / "targets.npy", drawn.reshape(NUM_BATCHES, BATCH_SIZE).numpy())
        del counts, draw, drawn
        for group in groups(fitting, num_classes, budget):
            measured |= measure(group, num_classes, rounds, Path(folder))
    about = {"counts": law, **provenance(), "huge_pages": 1}
    return [
        {"design": name, "num_classes": num_classes, **columns(name, num_classes, measured[name]), **about}
        for name in names
    ]


def columns(name: str, num_classes: int, measured: DesignCost | str) -> Row:
    """Return the columns of one design; without numbers the note says why."""
    names = "step_ms_p20 step_ms step_ms_p80 to_products setup_s rebuild_s every rebuild_ms_per_step beyond_gib"
    empty: Row = dict.fromkeys([*names.split(), "products_gflops", "note"], "")
    if isinstance(measured, str):
        return empty | {"note": measured}
    low, median, high = (round(time * 1e3, 3) for time in quantiles(measured.times))
    every = [steps_between(num_classes) for steps_between in DESIGNS[name].every]
    amortised = sum(seconds / steps for seconds, steps in zip(measured.rebuild_s, every, strict=True))
    return empty | {
        "step_ms_p20": low,
        "step_ms": median,
        "step_ms_p80": high,
        "to_products": round(median / 1e3 / measured.floor, 2),
        "setup_s": round(measured.setup_s, 3),
        "rebuild_s": round(sum(measured.rebuild_s), 4),
        "every": min(every, default=""),
        "rebuild_ms_per_step": round(amortised * 1e3, 4),
        "beyond_gib": round(measured.beyond_gib, 3),
        "products_gflops": round(3 * 2 * BATCH_SIZE * K * DIM / measured.floor / 1e9, 1),
    }


def exponent(points: list[tuple[float, float]]) -> float | None:
    """Return the slope of log y against log x; None if fewer than two points have a y above 0."""
    points = [(x, y) for x, y in points if y > 0]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)).slope


def growth(rows: list[Row]) -> str:
    """Return a table of the growth of each design's step time and rebuild time per step with the number of classes."""
    lines = [f"{'as C to the power':28}{'step':>8}{'rebuild':>9}"]
    for name in dict.fromkeys(str(row["design"]) for row in rows):
        own = [row for row in rows if row["design"] == name and not row["note"]]
        cells = []
        for column in ("step_ms", "rebuild_ms_per_step"):
            slope = exponent([(float(str(row["num_classes"])), float(str(row[column]))) for row in own])
            cells.append("–" if slope is None else f"{slope:.2f}")
        lines.append(f"{name:28}{cells[0]:>8}{cells[1]:>9}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=SIZES, type=lambda size: int(float(size)), metavar="C")
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), choices=DESIGNS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each design")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of all processes (default: 3/4 of free)")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/design_cost.csv, for a whole run)")
    arguments = parser.parse_args()
    budget = arguments.memory or 0.75 * free_gib()
    whole = (arguments.classes, arguments.designs, arguments.rounds) == (SIZES, list(DESIGNS), ROUNDS)
    path = arguments.out or (RESULTS if whole else None)
    rows: list[Row] = []
    for num_classes in arguments.classes:
        print(f"\n{num_classes:.0e} classes", end="", flush=True)
        part = run(arguments.designs, num_classes, arguments.rounds, budget)
        rates = [row["products_gflops"] for row in part if row["products_gflops"]]
        print(
            f", products at {' to '.join(map(str, dict.fromkeys([min(rates), max(rates)])))} GFlop/s" if rates else ""
        )
        print(
            f"{'':28}{'p20':>10}{'ms':>10}{'p80':>10}{'× products':>12}{'set-up s':>10}{'rebuild s':>10}{'every':>8}"
            f"{'ms/step':>11}{'GiB':>8}"
        )
        for row in part:
            print(
                f"{row['design']:28}{row['step_ms_p20']:>10}{row['step_ms']:>10}{row['step_ms_p80']:>10}"
                f"{row['to_products']:>12}{row['setup_s']:>10}{row['rebuild_s']:>10}{row['every']:>8}"
                f"{row['rebuild_ms_per_step']:>11}{row['beyond_gib']:>8}  {row['note']}".rstrip(),
                flush=True,
            )
        rows += part
        if path is not None:
            # Write after each size, so that an interruption loses only the current one.
            write_csv(path, rows)
    print(f"\n{growth(rows)}")
    if path is not None:
        print(f"written to {path}")


if __name__ == "__main__":
    main()
