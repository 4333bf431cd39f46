"""A step of a head whose classes are divided among processes: bytes sent, time, memory, by classes and processes.

    python -m benchmarks.divided                                     # into benchmarks/results/divided.csv
    python -m benchmarks.divided --classes 1000 --ranks 1 2 --repeats 3    # printed only

Every process gives the same number of examples. Bytes are those that a process hands to collectives in a step, beside
those predicted from the sizes of the batch: the prediction knows neither C nor k. Processes share the cores of this
machine, so that their times only say how a step grows with C. Memory is what a process holds more than before the head
was made, and at most. Heads are made without values, counts with all classes on every process.
"""

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.machine import peak_gib, provenance, write_csv
from manyclass import ClassHead
from manyclass.optim import RowAdagrad
from manyclass.parallel import shard
from manyclass.samplers import Systematic

RESULTS = Path(__file__).resolve().parent / "results" / "divided.csv"
WARM_UP_STEPS = 3


def predicted(batch: int, dim: int, ranks: int) -> int:
    """Return the bytes of a step that a process gives `batch` examples to, without further arguments of the loss."""
    if ranks == 1:
        return 0
    everyone = batch * ranks
    # Hidden vectors in float32 and targets, and back their gradient and that of the losses.
    exchanged = batch * (4 * dim + 8) + 4 * everyone * dim + 4 * batch
    # Scores of the targets, sums of the slots, the weight of the batch, and the offset of the draw.
    return exchanged + 4 * everyone + 4 * everyone + 4 + 8


def measure(rank: int, folder: str, ranks: int, classes: int, arguments: argparse.Namespace) -> None:
    """Train a few steps on one of the processes, and save what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    before = peak_gib()
    sampler = Systematic(torch.arange(1, classes + 1).double().reciprocal_(), arguments.k)
    head = ClassHead(arguments.dim, classes, sampler=sampler, sparse=True, device="meta")
    head = shard(head, init_device_mesh("cpu", (ranks,)))
    made = resident_gib()
    optimizer = RowAdagrad(head.parameters(recurse=False), 0.1, by_row=True)
    generator = torch.Generator().manual_seed(rank)
    seconds, sent = [], 0
    for step in range(WARM_UP_STEPS + arguments.repeats):
        hidden = torch.randn(arguments.batch, arguments.dim, generator=generator).requires_grad_()
        target = torch.randint(0, classes, (arguments.batch,), generator=generator)
        assert head.shard is not None
        head.shard.sent.clear()
        started = time.perf_counter()
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
        if step >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - started)
        sent = sum(head.shard.sent.values())
    found = {"sent": sent, "ms": 1e3 * statistics.median(seconds), "held": made - before, "peak": peak_gib() - before}
    torch.save(found, f"{folder}/found-{rank}")
    dist.destroy_process_group()


def resident_gib() -> float:
    """Return the memory that this process holds now."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 2**20


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", type=int, default=[100_000, 10_000_000], help="numbers of classes")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--dim", type=int, default=64, help="dimensions")
    parser.add_argument("--batch", type=int, default=256, help="examples of each process")
    parser.add_argument("--k", type=int, default=1024, help="classes drawn")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/divided.csv, if no size is given)")
    arguments = parser.parse_args()
    rows = []
    for classes in arguments.classes:
        for ranks in arguments.ranks:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(measure, (folder, ranks, classes, arguments), nprocs=ranks)
                found = [torch.load(f"{folder}/found-{rank}") for rank in range(ranks)]
            row = {
                "classes": classes,
                "ranks": ranks,
                "dim": arguments.dim,
                "batch": arguments.batch,
                "k": arguments.k,
                "bytes_sent": max(part["sent"] for part in found),
                "bytes_predicted": predicted(arguments.batch, arguments.dim, ranks),
                "ms": round(max(part["ms"] for part in found), 2),
                "held_bytes_per_class": round(max(part["held"] for part in found) * 2**30 / classes * ranks, 1),
                "peak_bytes_per_class": round(max(part["peak"] for part in found) * 2**30 / classes, 1),
                **provenance(),
            }
            rows.append(row)
            shown = f"{row['bytes_sent']:>9,} bytes a step ({row['bytes_predicted']:,} predicted), {row['ms']:8.2f} ms"
            memory = f"{row['held_bytes_per_class']} bytes a class held, at most {row['peak_bytes_per_class']} of all"
            print(f"{classes:>11,} classes, {ranks} processes: {shown}, {memory}", flush=True)
    out = arguments.out or (RESULTS if len(sys.argv) == 1 else None)
    if out is not None:
        write_csv(out, rows)
        print(f"{len(rows)} rows are in {out}")


if __name__ == "__main__":
    sys.exit(main())
