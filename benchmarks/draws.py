"""Time of a sampler's draw and of its set-up, for 10⁴ to 10⁸ classes.

    python benchmarks/draws.py                     # the whole table, into benchmarks/results/draws.csv
    python benchmarks/draws.py --sizes 1e4 1e5     # a part of it, printed only

A draw is a whole call `sampler(target)` for 256 targets and k = 1000. It takes turns with the three matrix products of
a training step (256 × 1000 × 128): the draw should be small against them. Each sampler is set up in a separate process,
so that its peak memory is known, once with huge pages and once without.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from manyclass.samplers import Bernoulli, Importance, Sampler, Systematic, WithExplicit

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import zipf_counts  # noqa: E402
from benchmarks.machine import alternate, peak_gib, provenance, quantiles, write_csv  # noqa: E402

RESULTS = ROOT / "results" / "draws.csv"
BATCH_SIZE, K, DIM = 256, 1000, 128

SAMPLERS = {
    "importance": lambda counts: Importance(counts, K),
    "importance, uniform": lambda counts: Importance(counts, K, power=0.0),
    "bernoulli": lambda counts: Bernoulli(counts, K),
    "systematic": lambda counts: Systematic(counts, K),
    "minibatch explicit, systematic": lambda counts: WithExplicit(Systematic(counts, K), "batch"),
    "half explicit, half systematic": lambda counts: WithExplicit.budget(Systematic(counts, K // 2), K),
}


def measure(name: str, num_classes: int, repeats: int) -> dict[str, object]:
    """Measure one row of the table in this process."""
    generator = torch.Generator().manual_seed(0)
    counts, law = zipf_counts(num_classes)
    before = peak_gib()
    start = time.perf_counter()
    sampler: Sampler = SAMPLERS[name](counts)
    setup = time.perf_counter() - start
    # Draw targets by frequency, as in training.
    target = Importance(counts, BATCH_SIZE)(torch.zeros(1, dtype=torch.int64), generator=generator).ids()[0]
    hidden, rows, gamma = torch.randn(BATCH_SIZE, DIM), torch.randn(K, DIM), torch.randn(BATCH_SIZE, K)

    def products() -> None:
        hidden @ rows.T
        gamma @ rows
        gamma.T @ hidden

    times = alternate({"draw": lambda: sampler(target, generator=generator), "products": products}, repeats)
    low, median, high = quantiles(times["draw"])
    _, floor, _ = quantiles(times["products"])
    return {
        "sampler": name,
        "num_classes": num_classes,
        "slots": sampler(target, generator=generator).ids().shape[1],
        "draw_us_p20": round(low * 1e6, 1),
        "draw_us": round(median * 1e6, 1),
        "draw_us_p80": round(high * 1e6, 1),
        "products_us": round(floor * 1e6, 1),
        "ratio": round(median / floor, 3),
        "products_gflops": round(3 * 2 * BATCH_SIZE * K * DIM / floor / 1e9, 1),
        "setup_s": round(setup, 2),
        "setup_peak_gib": round(peak_gib(), 2),
        "counts_gib": round(before, 2),
        "counts": law,
        **provenance(),
    }


def measure_in_process(name: str, num_classes: int, repeats: int, huge: bool) -> dict[str, object]:
    """Measure one row of the table in a new process."""
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": str(int(huge))}
    command = [sys.executable, __file__, "--row", name, "--sizes", str(num_classes), "--repeats", str(repeats)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} at {num_classes} classes failed:\n{done.stderr}")
    row: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1e4", "1e5", "1e6", "1e7", "1e8"], help="numbers of classes")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--row", choices=SAMPLERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(float(size)) for size in arguments.sizes]
    if arguments.row:
        print(json.dumps(measure(arguments.row, sizes[0], arguments.repeats)))
        return
    rows = []
    print(
        f"{'sampler':32}{'classes':>10}{'huge':>6}{'draw µs':>10}{'products µs':>13}{'ratio':>8}"
        f"{'set-up s':>10}{'GiB':>7}"
    )
    for num_classes in sizes:
        for name in SAMPLERS:
            for huge in (False, True):
                row = measure_in_process(name, num_classes, arguments.repeats, huge)
                rows.append(row)
                print(
                    f"{name:32}{num_classes:>10.0e}{int(huge):>6}{row['draw_us']:>10}{row['products_us']:>13}"
                    f"{row['ratio']:>8}{row['setup_s']:>10}{row['setup_peak_gib']:>7}",
                    flush=True,
                )
    if sizes == [10**n for n in range(4, 9)]:
        write_csv(RESULTS, rows)
        print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
