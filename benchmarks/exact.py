"""Error and time of every way to the exact loss, from 10⁴ to 10⁶ classes.

    python benchmarks/exact.py --device cuda                       # the whole table, into results/exact-<device>.csv
    python benchmarks/exact.py --classes 1e4 3e4 --repeats 3       # a part of it, printed only

First every way that this machine has is compared with float64 on small problems, in losses and gradients: its error is
at most twice that of F.linear and F.cross_entropy in the same dtype, plus 1e-5; otherwise the run fails. Then forward
and backward passes are timed in turn, beside the three matrix products that no way can do without. `bfloat16` means
autocast with float32 parameters. "default" marks the way that is taken without measurement, "fastest" the one that
`fastest_way` finds. "head" is a whole step of a ClassHead with `Exhaustive`.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass import ClassHead
from manyclass.kernels import available_ways, default_way, exact_cross_entropy, fastest_way
from manyclass.samplers import Exhaustive

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.machine import processor, provenance, quantiles, write_csv  # noqa: E402

CLASSES = [10_000, 30_000, 100_000, 300_000, 1_000_000]
DTYPES = ["float32", "bfloat16"]
REPEATS = 20
SMALL = [(3, 50, 16), (64, 1_000, 32), (130, 5_003, 48)]  # B, C, D
MAX_GIB = 16.0  # of the scores [B, C]: beyond, ways that keep them are not timed

Row = dict[str, object]
Operands = dict[str, Tensor]


def problem(batch: int, num_classes: int, dim: int, device: str) -> Operands:
    """Return hidden, weight, bias and target in float32, scores of standard deviation 2."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return {
        "hidden": normal(batch, dim),
        "weight": normal(num_classes, dim) * 2 / dim**0.5,
        "bias": normal(num_classes),
        "target": torch.randint(num_classes, (batch,), generator=generator).to(device),
    }


def precision(dtype: str, device: str) -> contextlib.AbstractContextManager[object]:
    """Return autocast for bfloat16, and a context that changes nothing for float32."""
    return contextlib.nullcontext() if dtype == "float32" else torch.autocast(device, getattr(torch, dtype))


def results(call: Callable[..., Tensor], operands: Operands) -> list[Tensor]:
    """Return the losses and the gradients of hidden, weight and bias, for losses of different weights."""
    leaves = {name: operands[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")}
    loss = call(**leaves, target=operands["target"])
    upstream = torch.linspace(-1, 2, len(loss), dtype=loss.dtype, device=loss.device)
    return [loss.detach(), *torch.autograd.grad(loss, list(leaves.values()), upstream)]


def reference(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Return the losses [B] of torch's two functions."""
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), target, reduction="none")


def double(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Return the losses [B] in float64."""
    scores = F.linear(hidden.double(), weight.double(), bias.double())
    return F.cross_entropy(scores, target, reduction="none")


def errors(device: str, dtype: str) -> dict[str, float]:
    """Return the largest relative error of each way.

    Raises:
        RuntimeError: one is larger than the rule allows.
    """
    worst: dict[str, float] = {}
    for sizes in SMALL:
        operands = problem(*sizes, device)
        truth = results(double, operands)

        def error(found: list[Tensor], truth: list[Tensor] = truth) -> float:
            pairs = zip(found, truth, strict=True)
            return max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in pairs)

        with precision(dtype, device):
            allowed = 2 * error(results(reference, operands)) + 1e-5
            for way in available_ways(operands["hidden"], operands["weight"]):
                found = error(results(lambda way=way, **given: exact_cross_entropy(**given, way=way), operands))
                worst[way] = max(worst.get(way, 0.0), found)
                if not found <= allowed:
                    raise RuntimeError(
                        f"{way} in {dtype} has the error {found:.2g} at {sizes}, allowed is {allowed:.2g}"
                    )
    return worst


def products(operands: Operands, dtype: str) -> Callable[[], None]:
    """Return the three products of a step, without anything else."""
    kind = getattr(torch, dtype)
    hidden, weight = (operands[name].to(kind) for name in ("hidden", "weight"))

    def run() -> None:
        scores = hidden @ weight.T
        scores @ weight
        scores.T @ hidden

    return run


def steps(operands: Operands, dtype: str, device: str) -> dict[str, Callable[[], None]]:
    """Return a forward and backward pass of every way that fits, of torch's functions and of a head."""
    scores_gib = operands["hidden"].shape[0] * operands["weight"].shape[0] * 4 / 2**30
    leaves = {name: operands[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")}
    target, wanted = operands["target"], list(leaves.values())

    def passes(call: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            with precision(dtype, device):
                loss = call(**leaves, target=target).mean()
            torch.autograd.grad(loss, wanted)

        return run

    with precision(dtype, device):
        ways = available_ways(operands["hidden"], operands["weight"])
    keeping = ("eager", "closed_form", "liger")
    found = {way: passes(lambda way=way, **given: exact_cross_entropy(**given, way=way)) for way in ways}
    found = {way: run for way, run in found.items() if scores_gib <= MAX_GIB or way not in keeping}
    if scores_gib <= MAX_GIB:
        found["F.cross_entropy"] = passes(reference)
    num_classes, dim = operands["weight"].shape
    head = ClassHead(dim, num_classes, sampler=Exhaustive(num_classes), device=device)

    def step() -> None:
        head.zero_grad()
        with precision(dtype, device):
            loss = head(leaves["hidden"], target)
        loss.backward()
        leaves["hidden"].grad = None

    return {"products": products(operands, dtype), **found, "head": step}


def wait(device: str) -> None:
    """Wait for the GPU, if the device is one."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(contenders: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of each contender, all taking turns after one untimed run."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def measure(num_classes: int, arguments: argparse.Namespace, dtype: str, error: dict[str, float]) -> list[Row]:
    """Return the rows of one number of classes and one dtype."""
    device = arguments.device
    operands = problem(arguments.batch, num_classes, arguments.dim, device)
    contenders = steps(operands, dtype, device)
    times = timed(contenders, arguments.repeats, device)
    with precision(dtype, device):
        marks = {default_way(operands["hidden"], operands["weight"]): "default"}
        fastest, seconds = fastest_way(**operands)
    marks[fastest] = f"{marks.get(fastest, '')} fastest, measured {seconds * 1e3:.2f} ms".strip()
    _, floor, _ = quantiles(times["products"])
    rows: list[Row] = []
    for name in contenders:
        low, median, high = quantiles(times[name])
        rows.append(
            {
                "way": name,
                "num_classes": num_classes,
                "batch": arguments.batch,
                "dim": arguments.dim,
                "dtype": dtype,
                "ms_p20": round(low * 1e3, 4),
                "ms": round(median * 1e3, 4),
                "ms_p80": round(high * 1e3, 4),
                "to_products": round(median / floor, 3),
                "error": f"{error[name]:.2g}" if name in error else "",
                "note": marks.get(name, ""),
                "device": torch.cuda.get_device_name() if device.startswith("cuda") else processor(),
                **provenance(),
            }
        )
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--classes", nargs="+", default=CLASSES, type=lambda size: int(float(size)), metavar="C")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES, metavar="DTYPE")
    parser.add_argument("--batch", type=int, default=512, help="examples of a step")
    parser.add_argument("--dim", type=int, default=128, help="length of a class vector")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of each way")
    parser.add_argument("--out", type=Path, help="CSV file (default: results/exact-<device>.csv, for a whole run)")
    arguments = parser.parse_args()
    whole = (arguments.classes, arguments.dtypes, arguments.repeats) == (CLASSES, DTYPES, REPEATS)
    path = arguments.out or (ROOT / "results" / f"exact-{arguments.device}.csv" if whole else None)
    rows: list[Row] = []
    for dtype in arguments.dtypes:
        error = errors(arguments.device, dtype)
        print(f"\n{dtype}, largest relative error:", ", ".join(f"{way} {found:.1e}" for way, found in error.items()))
        print(f"{'way':24}{'classes':>10}{'p20':>12}{'ms':>12}{'p80':>12}{'× products':>12}")
        for num_classes in arguments.classes:
            part = measure(num_classes, arguments, dtype, error)
            for row in part:
                print(
                    f"{row['way']:24}{num_classes:>10}{row['ms_p20']:>12}{row['ms']:>12}{row['ms_p80']:>12}"
                    f"{row['to_products']:>12}  {row['note']}".rstrip(),
                    flush=True,
                )
            rows += part
            if path is not None:
                # Write after each size, so that an interruption loses only the current one.
                write_csv(path, rows)
    if path is not None:
        print(f"written to {path}")


if __name__ == "__main__":
    main()
