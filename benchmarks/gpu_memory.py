"""Memory of a training of many classes on a GPU, by what holds it.

    python -m benchmarks.gpu_memory     # 10⁸ classes of 128 dimensions, into benchmarks/results/gpu_memory.csv

The parts are what torch's allocator holds more after each is made: the table in bfloat16, the sampler, and the
optimiser's state after a first step. The rest is the peak of further steps beyond these. The peak of a rebuild is that
of `sampler.refresh()` beyond what is held before it.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.counts import zipf_counts
from benchmarks.machine import provenance, write_csv
from manyclass import ClassHead
from manyclass.optim import RowAdagrad
from manyclass.samplers import Systematic

RESULTS = Path(__file__).resolve().parent / "results" / "gpu_memory.csv"
STEPS = 5
MAX_SAMPLER_BYTES_PER_CLASS = 16
MAX_REST_GIB = 1.0


class Meter:
    """The bytes that torch's allocator holds on a GPU; 0 on the CPU, which has no such allocator."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device != "cpu"
        self.held = self._now()

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def added(self) -> int:
        """Return the bytes that are held more than at the last call, and from now on count from here."""
        before, self.held = self.held, self._now()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        return self.held - before

    def peak(self) -> int:
        """Return the most bytes that were held since the last call of `added`, beyond those held then."""
        return torch.cuda.max_memory_allocated() - self.held if self.on_gpu else 0


def parts(classes: int, dim: int, batch: int, k: int, device: str, impl: str) -> dict[str, int]:
    """Return the bytes of each part of a training."""
    counts, _ = zipf_counts(classes)
    meter = Meter(device)
    weight = torch.empty(classes, dim, dtype=torch.bfloat16, device=device)
    weight.normal_(std=dim**-0.5)
    found = {"table": meter.added()}
    sampler = Systematic(counts, k).to(device)
    found["sampler"] = meter.added()
    parameter = torch.nn.Parameter(weight)
    head = ClassHead(dim, classes, sampler=sampler, bias=False, sparse=True, impl=impl, weight=parameter)
    optimizer = RowAdagrad(head.parameters(), 0.1, by_row=True, impl=impl, stochastic_rounding=True)
    hidden, target = torch.randn(batch, dim, device=device).bfloat16(), torch.randint(classes, (batch,), device=device)

    def step() -> None:
        head(hidden, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    meter.added()
    step()
    found["optimiser"] = meter.added()
    for _ in range(STEPS):
        step()
    found["rest"] = meter.peak()
    meter.added()
    sampler.refresh()
    found["rebuild"] = meter.peak()
    return found


def main() -> int:
    """Run the command line; return 1 if the sampler or the rest takes more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--impl", default="triton", help="implementation of the draw, the loss and the row updates")
    parser.add_argument("--classes", type=int, default=100_000_000, help="number of classes")
    parser.add_argument("--dim", type=int, default=128, help="dimensions of a class vector")
    parser.add_argument("--batch", type=int, default=8192, help="examples of a step")
    parser.add_argument("--k", type=int, default=8192, help="classes drawn in a step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, "gpu_memory: there is no GPU; --device cpu tries the script\n")
    sizes = {name: getattr(arguments, name) for name in ("classes", "dim", "batch", "k")}
    found = parts(**sizes, device=arguments.device, impl=arguments.impl)
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    rows = [
        {"part": part, "gib": round(number / 2**30, 4), "bytes_per_class": round(number / arguments.classes, 3)}
        | {**sizes, "impl": arguments.impl, "device": device, **provenance()}
        for part, number in found.items()
    ]
    for row in rows:
        print(f"{row['part']:12}{row['gib']:9.3f} GiB{row['bytes_per_class']:9.2f} bytes a class")
    write_csv(arguments.out, rows)
    fits = found["sampler"] <= MAX_SAMPLER_BYTES_PER_CLASS * arguments.classes and found["rest"] <= MAX_REST_GIB * 2**30
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
