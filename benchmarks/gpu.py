"""Time of a whole sampled training step on a GPU: draw, loss, gradients and row-wise Adagrad.

    python -m benchmarks.gpu                                  # all settings, into benchmarks/results/gpu.csv
    python -m benchmarks.gpu --settings words --repeats 50    # one of them, printed only
    python -m benchmarks.gpu --profile                        # also the kernels of each step, by their time

Contenders take turns, a step each, in one run. A step is timed by events around it in a plain loop, launches included;
`device_ms` is the time that its kernels take, by torch's profiler. Tables are in bfloat16 with a float32 state of one
number a row, hidden vectors in bfloat16. The floor is what no step can do without: the three products of the scores and
their gradients, the rows gathered and written. `over_floor` compares medians of the same run.

- `floor`: the products, an index_select of the rows and an index_copy of as many.
- `eager`, `triton`: `ClassHead(sparse=True)` with `Systematic` and `RowAdagrad(by_row=True)`, by torch's operators and
  by Triton's kernels.
- `default`: the same with the default sampler of a head, which may score all classes.
- `plain torch`: hand-written, with classes drawn by frequency with replacement.
- `exact`, `exact, compiled`: all classes by F.linear and F.cross_entropy, without an update; up to 200,000 classes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.counts import zipf_counts
from benchmarks.machine import provenance, quantiles, write_csv
from manyclass import ClassHead
from manyclass.kernels import triton
from manyclass.optim import RowAdagrad
from manyclass.samplers import Systematic

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "gpu.csv"
MAX_EXACT_CLASSES = 200_000
WARM_UP_STEPS = 10
LEARNING_RATE = 0.1
BATCHES = 4  # of targets, used in turn, so that the same rows are not in the cache


@dataclass(frozen=True)
class Setting:
    """Sizes of a step: classes, dimensions, examples and classes drawn."""

    classes: int
    dim: int
    batch: int
    k: int


SETTINGS = {
    "items": Setting(1_000_000, 256, 8192, 8192),
    "many items": Setting(100_000_000, 128, 8192, 8192),
    "tokens": Setting(131_072, 2048, 8192, 8192),
    "words": Setting(33_000, 128, 1024, 1024),
}
Step = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """The operands of a step: a table, its counts, hidden vectors and batches of targets."""

    setting: Setting
    weight: Tensor
    counts: Tensor
    hidden: Tensor
    targets: list[Tensor]


def problem(setting: Setting, device: str) -> Problem:
    """Return a problem whose targets follow Zipf's law."""
    counts, _ = zipf_counts(setting.classes)
    generator = torch.Generator().manual_seed(0)
    line = counts.cumsum(0)
    place = torch.rand(BATCHES, setting.batch, dtype=torch.float64, generator=generator) * line[-1]
    targets = torch.searchsorted(line, place).clamp_(max=setting.classes - 1)
    weight = torch.empty(setting.classes, setting.dim, dtype=torch.bfloat16, device=device)
    weight.normal_(std=setting.dim**-0.5)
    hidden = torch.randn(setting.batch, setting.dim, device=device).bfloat16()
    return Problem(setting, weight, counts, hidden, list(targets.to(device)))


def in_turn(targets: list[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns the batches of targets in turn."""
    number = 0

    def take() -> Tensor:
        nonlocal number
        number += 1
        return targets[number % len(targets)]

    return take


def floor(given: Problem) -> Step:
    """Return the products of a step, and its rows read and written."""
    setting, weight, hidden = given.setting, given.weight, given.hidden
    drawn = torch.randint(setting.classes, (setting.k,), device=weight.device)
    target = in_turn(given.targets)

    def step() -> None:
        ids = torch.cat([target(), drawn])
        rows = weight.index_select(0, ids)
        scores = hidden @ rows[setting.batch :].T
        scores @ rows[setting.batch :]
        scores.T @ hidden
        # The rows as they were: the other contenders train the same table.
        weight.index_copy_(0, ids, rows)

    return step


def ours(given: Problem, impl: str | None) -> Step:
    """Return a step of a head with an implementation; None: the default sampler with the default one."""
    setting = given.setting
    sampler = None if impl is None else Systematic(given.counts, setting.k)
    head = ClassHead(
        setting.dim,
        setting.classes,
        counts=given.counts,
        sampler=sampler,
        impl=impl or "auto",
        bias=False,
        sparse=True,
        weight=torch.nn.Parameter(given.weight),
    ).to(given.weight.device)
    optimizer = RowAdagrad(head.parameters(), LEARNING_RATE, by_row=True, impl=impl or "auto")
    target = in_turn(given.targets)

    def step() -> None:
        hidden = given.hidden.detach().requires_grad_()
        optimizer.zero_grad()
        head(hidden, target()).backward()
        optimizer.step()

    return step


def plain_torch(given: Problem) -> Step:
    """Return a hand-written step: classes drawn by frequency with replacement, κ = 1/(k q)."""
    setting, weight, device = given.setting, given.weight, given.weight.device
    line = given.counts.cumsum(0).to(device)
    log_q = (given.counts / given.counts.sum()).log().float().to(device)
    state = torch.zeros(setting.classes, device=device)
    target_of = in_turn(given.targets)
    log_k = torch.tensor(float(setting.k), device=device).log()

    def step() -> None:
        target, hidden = target_of(), given.hidden.detach().requires_grad_()
        place = torch.rand(setting.k, dtype=torch.float64, device=device) * line[-1]
        drawn = torch.searchsorted(line, place).clamp_(max=setting.classes - 1)
        ids = torch.cat([target, drawn])
        rows = weight.index_select(0, ids).requires_grad_()
        own = (hidden * rows[: setting.batch]).float().sum(1, keepdim=True)
        scores = (hidden @ rows[setting.batch :].T).float() - (log_q[drawn] + log_k)
        scores = scores.masked_fill(drawn == target.unsqueeze(1), float("-inf"))
        loss = F.cross_entropy(torch.cat([own, scores], 1), torch.zeros_like(target))
        gradient = torch.autograd.grad(loss, [hidden, rows])[1].float()
        unique, place = ids.unique(return_inverse=True)
        total = torch.zeros(len(unique), setting.dim, device=device).index_add_(0, place, gradient)
        squares = state[unique] + total.square().mean(1)
        state[unique] = squares
        moved = weight[unique].float() - LEARNING_RATE * total / (squares.sqrt().unsqueeze(1) + 1e-10)
        weight[unique] = moved.bfloat16()

    return step


def exact(given: Problem, *, compiled: bool) -> Step:
    """Return forward and backward passes over all classes."""
    weight, target = given.weight.detach().requires_grad_(), in_turn(given.targets)

    def loss_of(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target)

    run = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        hidden = given.hidden.detach().requires_grad_()
        torch.autograd.grad(run(hidden, weight, target()), [hidden, weight])

    return step


def contenders(given: Problem, names: list[str]) -> dict[str, Step]:
    """Return the steps that can run here, by name."""
    small = given.setting.classes <= MAX_EXACT_CLASSES
    made: dict[str, Callable[[], Step]] = {
        "floor": lambda: floor(given),
        "eager": lambda: ours(given, "eager"),
        "default": lambda: ours(given, None),
        "plain torch": lambda: plain_torch(given),
    }
    if triton.is_available(given.hidden):
        made["triton"] = lambda: ours(given, "triton")
    if small:
        made["exact"] = lambda: exact(given, compiled=False)
        made["exact, compiled"] = lambda: exact(given, compiled=True)
    return {name: make() for name, make in made.items() if name in names}


NAMES = ["floor", "eager", "triton", "default", "plain torch", "exact", "exact, compiled"]


def timed(steps: dict[str, Step], repeats: int, device: str) -> dict[str, list[float]]:
    """Return the milliseconds of each step, which take turns."""
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(milliseconds(step, device))
    return times


def milliseconds(step: Step, device: str) -> float:
    """Return the milliseconds of a step, launches included."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    # The device is idle at the start, so that the time of launches counts.
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def kernels_of(step: Step, steps: int = 5) -> list[tuple[str, float, float]]:
    """Return the kernels of a step with their milliseconds and launches, longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    found = [(event.key, event.device_time_total / 1e3 / steps, event.count / steps) for event in events]
    return sorted(found, key=lambda item: -item[1])


def measure(name: str, setting: Setting, device: str, repeats: int, names: list[str], *, profiled: bool) -> list[dict]:
    """Return a row for each contender, and print it."""
    steps = contenders(problem(setting, device), names)
    times = timed(steps, repeats, device)
    base = statistics.median(times["floor"]) if "floor" in times else float("nan")
    rows = []
    for contender, step in steps.items():
        low, median, high = quantiles(times[contender])
        row = {
            "setting": name,
            "contender": contender,
            "classes": setting.classes,
            "dim": setting.dim,
            "batch": setting.batch,
            "k": setting.k,
            "ms_p20": round(low, 4),
            "ms": round(median, 4),
            "ms_p80": round(high, 4),
            "over_floor": round(median / base, 2),
            "device_ms": "",
            "launches": "",
            "peak_gib": "",
            "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
            **provenance(),
        }
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            step()
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
            found = kernels_of(step)
            row["device_ms"] = round(sum(ms for _, ms, _ in found), 4)
            row["launches"] = round(sum(number for _, _, number in found))
            if profiled:
                for kernel, ms, _ in found[:12]:
                    print(f"        {ms:8.4f} ms  {kernel[:90]}")
        rows.append(row)
        shown = f"{row['ms']:9.3f} ms  {row['over_floor']:6.2f} × the floor  device {row['device_ms']} ms"
        print(f"{name:12}{contender:18}{shown}", flush=True)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="sizes of the step")
    parser.add_argument("--contenders", nargs="+", default=NAMES, choices=NAMES, help="steps to time")
    parser.add_argument("--repeats", type=int, default=40, help="timed steps of each contender")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes but the dimensions by this")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each step")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/gpu.csv, if all settings run in full)")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, "gpu: there is no GPU; --device cpu tries the script\n")
    rows = []
    for name in arguments.settings:
        full = SETTINGS[name]
        sizes = (max(2, number // arguments.shrink) for number in (full.classes, full.batch, full.k))
        classes, batch, k = sizes
        setting = Setting(classes, full.dim, batch, min(k, classes))
        rows += measure(
            name, setting, arguments.device, arguments.repeats, arguments.contenders, profiled=arguments.profile
        )
    complete = arguments.settings == list(SETTINGS) and arguments.contenders == NAMES and arguments.shrink == 1
    out = arguments.out or (RESULTS if complete else None)
    if out is not None:
        write_csv(out, rows)
        print(f"{len(rows)} rows are in {out}")


if __name__ == "__main__":
    sys.exit(main())
