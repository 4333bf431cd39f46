"""Time of a whole training step, ours and others', against the matrix products that every step needs.

    python benchmarks/step.py                       # the whole table, into benchmarks/results/step.csv
    python benchmarks/step.py --sizes 1e5 --huge 0  # a part of it, printed only

A step draws, scores, computes the gradients back to `hidden` [256, 128] and updates by Adagrad; k = 1000, float32, with
biases, targets drawn by frequency. Each contender has a separate process, so that its peak memory is known, and all
take turns within one run: in each of 20 rounds a contender makes three untimed steps, which warm up its threads and the
caches, and fifteen timed ones. A contender whose step takes longer than 0.1 s makes one step in five of the rounds. If
not all tables fit into memory at once, contenders run in groups, each with the products and, up to 10⁶ classes,
ours in it; at 10⁷ the ratio to ours is computed from the ratios to the products. Everything runs once with and once
without huge pages, which only torch uses.
"""

import argparse
import importlib.metadata
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from manyclass.samplers import Importance

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import zipf_counts  # noqa: E402
from benchmarks.machine import copy_gb_per_s, free_gib, provenance, quantiles, write_csv  # noqa: E402
from benchmarks.turns import ContenderProcess, NotInstalledError  # noqa: E402

RESULTS = ROOT / "results" / "step.csv"
BATCH_SIZE, K, DIM = 256, 1000, 128
SIZES = [10**5, 10**6, 10**7]
NUM_BATCHES = 64
ROUNDS, WARM_UP_STEPS, TIMED_STEPS = 20, 3, 15
SLOW_STEP_SECONDS, SLOW_ROUNDS = 0.1, 5


@dataclass(frozen=True)
class Contender:
    """Builder of a step, number of tables [C, D] held at its peak, and environment variables of its process."""

    build: str
    tables: float
    environment: dict[str, str] = field(default_factory=dict)

    def gib(self, num_classes: int) -> float:
        """Estimate the peak memory."""
        return 0.5 + self.tables * num_classes * DIM * 4 / 2**30


FLOOR, OURS = "products", "manyclass"
CONTENDERS = {
    FLOOR: Contender("contenders:products", 0),
    OURS: Contender("contenders:systematic", 2.2),
    "manyclass, Importance": Contender("contenders:importance", 2.2),
    "manyclass, not compiled": Contender("contenders:systematic", 2.2, {"MANYCLASS_NATIVE": "0"}),
    "torch sparse embedding": Contender("contenders:embedding", 2.2),
    "TensorFlow": Contender("contenders_tensorflow:adagrad", 2.2),
    "TensorFlow, no update": Contender("contenders_tensorflow:no_update", 1.2),
    "TensorFlow, Keras Adagrad": Contender("contenders_tensorflow:keras_adagrad", 4.5),
    "torch adaptive softmax": Contender("contenders:adaptive", 1),
    "torch linear_cross_entropy": Contender("contenders:chunked", 4.5),
    "torch exact": Contender("contenders:exact", 8.5),
}


@dataclass(frozen=True)
class StepCost:
    """Measurements of a contender, and the medians of the products and, if ours was in its group, of ours."""

    times: list[float]
    floor: float
    setup_s: float
    peak_gib: float
    ours: float | None = None

    @property
    def ratio(self) -> float:
        """Median time over that of the products."""
        return statistics.median(self.times) / self.floor


def groups(names: list[str], num_classes: int, budget: float) -> Iterator[list[str]]:
    """Yield groups that fit into memory, each with the products in it, and with ours if that is small."""
    anchors = [FLOOR]
    if OURS in names and CONTENDERS[OURS].gib(num_classes) <= budget / 4:
        anchors.append(OURS)
    others = [name for name in names if name not in anchors]
    room = budget - sum(CONTENDERS[name].gib(num_classes) for name in anchors)
    group: list[str] = []
    for name in others:
        if group and sum(CONTENDERS[member].gib(num_classes) for member in (*group, name)) > room:
            yield anchors + group
            group = []
        group.append(name)
    yield anchors + group


def measure(group: list[str], num_classes: int, rounds: int, data: Path, huge: bool) -> dict[str, StepCost | str]:
    """Time the contenders of a group in turn; a string says why a contender could not run."""
    environment = {
        "THP_MEM_ALLOC_ENABLE": str(int(huge)),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    missing: dict[str, StepCost | str] = {}
    turns: dict[str, ContenderProcess] = {}
    with ExitStack() as stack:
        for name in group:
            contender = CONTENDERS[name]
            try:
                turns[name] = ContenderProcess(contender.build, num_classes, data, environment | contender.environment)
                stack.callback(turns[name].close)
            except NotInstalledError as error:
                missing[name] = f"not installed: {error}"
        times: dict[str, list[float]] = {name: [] for name in turns}
        for i in range(rounds):
            for name, turn in turns.items():
                if turn.step_s < SLOW_STEP_SECONDS:
                    times[name] += turn.run_steps(untimed=WARM_UP_STEPS, timed=TIMED_STEPS)
                elif i % max(1, rounds // SLOW_ROUNDS) == 0:
                    times[name] += turn.run_steps(untimed=0, timed=1)
    floor, ours = (statistics.median(times[name]) if name in times else None for name in (FLOOR, OURS))
    assert floor is not None
    return missing | {
        name: StepCost(times[name], floor, turn.setup_s, turn.peak_gib, ours) for name, turn in turns.items()
    }


def run(names: list[str], num_classes: int, rounds: int, budget: float, huge: bool) -> list[dict[str, object]]:
    """Return the rows of one size."""
    counts, law = zipf_counts(num_classes)
    # Draw targets by frequency, as in training.
    draw = Importance(counts, NUM_BATCHES * BATCH_SIZE)
    drawn = draw(torch.zeros(1, dtype=torch.int64), generator=torch.Generator().manual_seed(0)).ids()
    copy = copy_gb_per_s()
    measured: dict[str, StepCost | str] = {}
    fitting = []
    for name in names:
        gib = CONTENDERS[name].gib(num_classes)
        if gib <= budget:
            fitting.append(name)
        else:
            measured[name] = f"would need {gib:.0f} GiB"
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "counts.npy", counts.numpy())
        np.save(Path(folder) / "targets.npy", drawn.reshape(NUM_BATCHES, BATCH_SIZE).numpy())
        del counts, draw, drawn
        for group in groups(fitting, num_classes, budget):
            measured = measure(group, num_classes, rounds, Path(folder), huge) | measured
    about = {"copy_gb_per_s": round(copy, 1), "counts": law, **provenance(), "huge_pages": int(huge)}
    about["tensorflow"] = tensorflow_version()
    ours = measured.get(OURS)
    return [{"contender": name, "num_classes": num_classes, **columns(measured[name], ours), **about} for name in names]


def columns(measured: StepCost | str, ours: StepCost | str | None) -> dict[str, object]:
    """Return the columns of one contender; without numbers the note says why."""
    names = "step_ms_p20 step_ms step_ms_p80 to_products to_manyclass steps peak_gib setup_s products_gflops note"
    empty: dict[str, object] = dict.fromkeys(names.split(), "")
    if isinstance(measured, str):
        return empty | {"note": measured}
    to_ours: object = ""
    if measured.ours is not None:
        to_ours = round(statistics.median(measured.times) / measured.ours, 3)
    elif isinstance(ours, StepCost):
        to_ours = round(measured.ratio / ours.ratio, 3)
    low, median, high = (round(time * 1e3, 3) for time in quantiles(measured.times))
    return empty | {
        "step_ms_p20": low,
        "step_ms": median,
        "step_ms_p80": high,
        "to_products": round(measured.ratio, 2),
        "to_manyclass": to_ours,
        "steps": len(measured.times),
        "peak_gib": round(measured.peak_gib, 2),
        "setup_s": round(measured.setup_s, 1),
        "products_gflops": round(3 * 2 * BATCH_SIZE * K * DIM / measured.floor / 1e9, 1),
    }


def tensorflow_version() -> str:
    """Return the version of TensorFlow, or "" if it is not installed."""
    try:
        return importlib.metadata.version("tensorflow-cpu")
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=SIZES, type=lambda size: int(float(size)), metavar="C", help="classes"
    )
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--huge", nargs="+", default=[0, 1], choices=(0, 1), type=int, help="huge pages: no, yes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contender")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of all processes (default: 3/4 of free)")
    arguments = parser.parse_args()
    budget = arguments.memory or 0.75 * free_gib()
    rows = []
    for num_classes in arguments.sizes:
        for huge in arguments.huge:
            print(f"\n{num_classes:.0e} classes, {'huge' if huge else 'small'} pages", end="", flush=True)
            part = run(arguments.contenders, num_classes, arguments.rounds, budget, bool(huge))
            print(f", a copy at {part[0]['copy_gb_per_s']} GB/s, products at {part[0]['products_gflops']} GFlop/s")
            print(f"{'':28}{'p20':>10}{'ms':>10}{'p80':>10}{'× products':>12}{'× ours':>10}{'GiB':>8}{'set-up s':>10}")
            for row in part:
                print(
                    f"{row['contender']:28}{row['step_ms_p20']:>10}{row['step_ms']:>10}{row['step_ms_p80']:>10}"
                    f"{row['to_products']:>12}{row['to_manyclass']:>10}{row['peak_gib']:>8}{row['setup_s']:>10}"
                    f"  {row['note']}".rstrip(),
                    flush=True,
                )
            rows += part
    whole = (SIZES, list(CONTENDERS), [0, 1], ROUNDS)
    if (arguments.sizes, arguments.contenders, arguments.huge, arguments.rounds) == whole:
        write_csv(RESULTS, rows)
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
