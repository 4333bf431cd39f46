"""Time of a whole sampled training step on a GPU: draw, loss, gradients and row-wise Adagrad.

    python -m benchmarks.gpu                                  # all settings, into benchmarks/results/gpu.csv
    python -m benchmarks.gpu --settings words --repeats 50    # one of them, printed only
    python -m benchmarks.gpu --profile                        # also the kernels of each step, by their time

Contenders take turns in one run, eight steps of a plain loop each, between events: launches are included, and a step
takes as long as the slower of Python and the device. `device_ms` is the time that its kernels take, by torch's
profiler. Tables are in bfloat16 with a float32 state of one number a row, hidden vectors in bfloat16. The floor is
what no step can do without: the three products of the scores and their gradients, the rows gathered and written.
`over_floor` compares medians of the same run. `of_bandwidth` and `of_tensor_peak` are shares of the speeds of a large
copy and of a large product in bfloat16, measured in the same run: the least bytes and operations of the step, over the
time that its kernels take. `step_gib` is the memory that a step takes beyond what is kept between steps.

- `floor`: the products, an index_select of the rows and an index_copy of as many.
- `eager`, `triton`, `auto`: `ClassHead(sparse=True)` with `Systematic` and `RowAdagrad(by_row=True)`, by torch's
  operators, by Triton's kernels, and as the library chooses; `auto_over_best` compares it with the better of the two.
- `compiled`, `compiled, triton`: the same compiled by torch, with its own kernels and with ours as an operator.
- `replayed`: `triton` by a `ReplayedStep`, as one CUDA graph.
- `default`: the same with the default sampler of a head, which may score all classes.
- `plain torch`: hand-written, with classes drawn by frequency with replacement.
- `exact`, `exact, compiled`, `liger`, `cut cross entropy`: forward and backward passes over all classes, without an
  update, up to 200,000 classes; the last two if they are installed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_contenders import (
    CONTENDERS,
    SETTINGS,
    Setting,
    Step,
    absence,
    floating_operations,
    problem,
    traffic_bytes,
)
from benchmarks.machine import provenance, quantiles, write_csv

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "gpu.csv"
WARM_UP_STEPS = 10
STEPS_PER_TURN = 8
MAX_AUTO_RATIO = 1.02  # of the time of "auto" to that of the better implementation
COPIED_BYTES, PRODUCT_SIZE = {"cuda": 1 << 30, "cpu": 1 << 20}, {"cuda": 8192, "cpu": 64}
Row = dict[str, Any]


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
    """Return the milliseconds of a step in a plain loop, launches included."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    # The device is idle at the start, so that the time of the first launches counts too.
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS_PER_TURN):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / STEPS_PER_TURN


def kernels_of(step: Step, steps: int = 5) -> list[tuple[str, float, float]]:
    """Return the kernels of a step with their milliseconds and launches, longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    # The calls that launch kernels are events too, which take no time on the device.
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    found = [(event.key, event.device_time_total / 1e3 / steps, event.count / steps) for event in events]
    return sorted(found, key=lambda item: -item[1])


def ceilings(device: str, repeats: int = 20) -> tuple[float, float]:
    """Return bytes per second of a copy, reads and writes, and operations per second of a product in bfloat16."""
    kind = "cpu" if device == "cpu" else "cuda"
    source = torch.ones(COPIED_BYTES[kind] // 2, dtype=torch.bfloat16, device=device)
    target, square = torch.empty_like(source), source[: PRODUCT_SIZE[kind] ** 2].view(PRODUCT_SIZE[kind], -1)
    out = torch.empty_like(square)
    times = timed(
        {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(square, square, out=out)}, repeats, device
    )
    copy, product = (statistics.median(times[name]) / 1e3 for name in ("copy", "product"))
    return 2 * source.nbytes / copy, 2 * PRODUCT_SIZE[kind] ** 3 / product


def measure(
    name: str, setting: Setting, device: str, repeats: int, names: Sequence[str], *, profiled: bool
) -> list[Row]:
    """Return a row for each contender, and print it."""
    given = problem(setting, device)
    missing = {contender: reason for contender in names if (reason := absence(contender, given))}
    steps = {contender: CONTENDERS[contender].make(given) for contender in names if contender not in missing}
    bandwidth, peak = ceilings(device)
    times = timed(steps, repeats, device)
    medians = {contender: statistics.median(found) for contender, found in times.items()}
    rows = []
    for contender in names:
        row: Row = {
            "setting": name,
            "contender": contender,
            "classes": setting.classes,
            "dim": setting.dim,
            "batch": setting.batch,
            "k": setting.k,
            **dict.fromkeys(MEASURED, ""),
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
            "product_tflops": round(peak / 1e12, 3),
            "absent": missing.get(contender, ""),
            "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
            "triton": triton_version(),
            **provenance(),
        }
        rows.append(row)
        if contender in missing:
            print(f"{name:12}{contender:18}{missing[contender]}", flush=True)
            continue
        low, median, high = quantiles(times[contender])
        row |= {"ms_p20": round(low, 4), "ms": round(median, 4), "ms_p80": round(high, 4)}
        if "floor" in medians:
            row["over_floor"] = round(median / medians["floor"], 2)
        if contender == "auto" and (best := [medians[i] for i in ("eager", "triton") if i in medians]):
            row["auto_over_best"] = round(median / min(best), 3)
        busy_ms = median
        if device != "cpu":
            found = kernels_of(steps[contender])
            busy_ms = sum(ms for _, ms, _ in found)
            row |= {"device_ms": round(busy_ms, 4), "launches": round(sum(number for *_, number in found))}
            row["step_gib"] = round(memory_of(steps[contender]) / 2**30, 3)
            for kernel, ms, _ in found[: 12 if profiled else 0]:
                print(f"        {ms:8.4f} ms  {kernel[:90]}")
        scores_all = CONTENDERS[contender].scores_all
        row["of_bandwidth"] = round(traffic_bytes(setting, scores_all=scores_all) / (busy_ms / 1e3) / bandwidth, 6)
        row["of_tensor_peak"] = round(floating_operations(setting, scores_all=scores_all) / (busy_ms / 1e3) / peak, 6)
        shown = f"{row['ms']:9.3f} ms  {row['over_floor']:6} × the floor  device {row['device_ms']} ms"
        print(f"{name:12}{contender:18}{shown}  {row['of_bandwidth']:.0%} of bandwidth", flush=True)
    return rows


MEASURED = (
    "ms_p20",
    "ms",
    "ms_p80",
    "over_floor",
    "auto_over_best",
    "device_ms",
    "launches",
    "step_gib",
    "of_bandwidth",
    "of_tensor_peak",
)


def memory_of(step: Step) -> int:
    """Return the bytes that a step allocates beyond what is kept."""
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - kept


def triton_version() -> str:
    """Return the version of Triton; empty if it is not installed."""
    try:
        import triton
    except ImportError:
        return ""
    return triton.__version__


def slow_choices(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each setting in which "auto" is slower than the better implementation."""
    return [
        f"{row['auto_over_best']} × the better implementation is the time of auto in the setting {row['setting']!r}"
        for row in rows
        if row["auto_over_best"] != "" and row["auto_over_best"] > MAX_AUTO_RATIO
    ]


def main() -> int:
    """Run the command line; return 1 if "auto" is checked and has chosen badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="sizes of the step")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="steps to time")
    parser.add_argument("--repeats", type=int, default=40, help="timed steps of each contender")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes but the dimensions by this")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each step")
    parser.add_argument("--check-auto", action="store_true", help="fail if auto is slower than the better one by 2 %%")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/gpu.csv, if all settings run in full)")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, "gpu: there is no GPU; --device cpu tries the script\n")
    complete = arguments.settings == list(SETTINGS) and arguments.contenders == list(CONTENDERS)
    out = arguments.out or (RESULTS if complete and arguments.shrink == 1 else None)
    rows = []
    for name in arguments.settings:
        full = SETTINGS[name]
        classes, batch, k = (max(2, n // arguments.shrink) for n in (full.classes, full.batch, full.k))
        setting = Setting(classes, full.dim, batch, min(k, classes))
        rows += measure(
            name, setting, arguments.device, arguments.repeats, arguments.contenders, profiled=arguments.profile
        )
        # After each setting, so that an interrupt loses one of them at most.
        if out is not None:
            write_csv(out, rows)
    if out is not None:
        print(f"{len(rows)} rows are in {out}")
    slow = slow_choices(rows)
    print(*slow, sep="\n", end="\n" if slow else "")
    return int(arguments.check_auto and bool(slow))


if __name__ == "__main__":
    sys.exit(main())
