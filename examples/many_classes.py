"""A hundred million classes, or a billion, on one GPU, beside the best that any model can do.

    python examples/many_classes.py                                           # 100 million classes, 128 dimensions
    python examples/many_classes.py --classes 1_000_000_000 --dim 32          # a billion
    python examples/many_classes.py --classes 20_000 --dim 32 --seconds 20    # on a CPU

The problem is planted, so that the Bayes optimum is known. A class is drawn first, with the probability
log((c + 2)/(c + 1))/log(C + 1), which is close to Zipf's law. The input is a vector of ±1, hashed from the number of
the class, plus noise. So the posterior is a softmax of inner products, and a head with these vectors as its rows is
optimal; but a class must occur before its row can be learned, and most of the classes hardly ever do. On a GPU rows and
inputs are in bfloat16, rows are rounded at random, and each step, examples included, is replayed as one CUDA graph.

Prints the held-out likelihood and accuracy over all classes by steps, the examples per second and the memory; with
`--out FOLDER` it also writes curves.csv and curves.png. Ctrl-C ends the training early.
"""

import argparse
import csv
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from manyclass import ClassHead
from manyclass.optim import RowAdagrad
from manyclass.samplers import Systematic
from manyclass.training import ReplayedStep

SEPARATION = 26.0  # of the log posterior: the squared length of a vector over the variance of the noise
HELD_OUT, CHUNK_CLASSES = 256, 1 << 20
FIRST_FACTOR, SECOND_FACTOR = 0x5851F42D4C957F2D, 0x14057B7EF767814F  # of a linear congruential generator


class Planted:
    """The planted problem.

    Args:
        classes: C.
        dim: D, a multiple of 32.
        device: where it is computed.
    """

    def __init__(self, classes: int, dim: int, device: str) -> None:
        self.classes, self.dim, self.device = classes, dim, torch.device(device)
        self.variance = dim / SEPARATION
        # Few processors multiply bfloat16 fast.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def log_prior(self, ids: Tensor) -> Tensor:
        """Return the log probabilities of classes, float64."""
        return torch.log1p(1 / (ids.double() + 1)).log() - math.log(math.log(self.classes + 1))

    def vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors [N, D] of ±1 of classes [N], 32 numbers from each hash."""
        word = torch.arange(self.dim // 32, device=ids.device)
        mixed = (ids.unsqueeze(1) * (self.dim // 32) + word + 1) * FIRST_FACTOR
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 29)) * SECOND_FACTOR + 1
        bits = (mixed.unsqueeze(2) >> torch.arange(24, 56, device=ids.device)) & 1
        return (2 * bits - 1).flatten(1).to(self.dtype)

    def examples(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [N, D] and classes [N] from random numbers in [0, 1)."""
        ids = ((self.classes + 1.0) ** uniform.double() - 1).long().clamp_(0, self.classes - 1)
        vectors = self.vectors(ids)
        return vectors + self.variance**0.5 * torch.randn_like(vectors), ids

    @torch.no_grad()
    def bayes(self, inputs: Tensor, ids: Tensor) -> tuple[float, float]:
        """Return the mean loss and the accuracy of the true posterior."""
        log_z = torch.full((len(ids),), -math.inf, device=self.device)
        best = log_z.clone()
        for start in range(0, self.classes, CHUNK_CLASSES):
            part = torch.arange(start, min(start + CHUNK_CLASSES, self.classes), device=self.device)
            # TF32 holds both factors exactly.
            scores = self._scores(inputs.float() @ self.vectors(part).float().T, part)
            log_z, best = torch.logaddexp(log_z, scores.logsumexp(1)), torch.maximum(best, scores.amax(1))
        own = self._scores((inputs.float() * self.vectors(ids).float()).sum(1), ids)
        # The product over all classes is summed in another order.
        return float((log_z - own).mean()), float((own >= best - 1e-3).double().mean())

    def _scores(self, products: Tensor, ids: Tensor) -> Tensor:
        return products / self.variance + self.log_prior(ids).float()


def train(problem: Planted, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train until the time is over, and return the curve."""
    device, on_gpu = problem.device, problem.device.type == "cuda"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    inputs, ids = problem.examples(torch.rand(HELD_OUT, dtype=torch.float64, device=device))
    started = time.perf_counter()
    loss, accuracy = problem.bayes(inputs, ids)
    spent = time.perf_counter() - started
    print(f"Bayes optimum: loss {loss:.4f}, accuracy {accuracy:.4f} ({spent:.1f} s over all classes)", flush=True)

    started = time.perf_counter()
    counts = problem.log_prior(torch.arange(problem.classes, device=device)).exp_()
    sampler = Systematic(counts, arguments.k)
    del counts
    # Rows start at 0: a random vector of a class that never occurs would be noise in the normaliser.
    weight = torch.nn.Parameter(torch.zeros(problem.classes, problem.dim, dtype=problem.dtype, device=device))
    head = ClassHead(problem.dim, problem.classes, sampler=sampler, sparse=True, weight=weight).to(device)
    # In proportion to the numbers in the best rows.
    rate = arguments.learning_rate or SEPARATION / 4 / problem.dim
    assert head.bias is not None
    tables = [
        RowAdagrad([weight], rate, by_row=True, stochastic_rounding=True),
        RowAdagrad([head.bias], 0.01, stochastic_rounding=True),
    ]
    print(f"{problem.classes:,} classes are set up in {time.perf_counter() - started:.1f} s", flush=True)

    def loss_of(uniform: Tensor) -> Tensor:
        inputs, ids = problem.examples(uniform)
        loss: Tensor = head(inputs, ids)
        return loss

    step = ReplayedStep(loss_of, tables, modules=[head])
    curve: list[dict[str, float]] = []
    steps, seconds, next_look = 0, 0.0, 0.0
    try:
        while seconds < arguments.seconds:
            begun, before = time.perf_counter(), steps
            next_look = max(2 * seconds, arguments.seconds / 16)
            while time.perf_counter() - begun < min(next_look, arguments.seconds) - seconds or steps == before:
                for _ in range(20):
                    step(torch.rand(arguments.batch, dtype=torch.float64, device=device))
                    steps += 1
                if on_gpu:
                    torch.cuda.synchronize()
            seconds += time.perf_counter() - begun
            curve.append(measured(head, inputs, ids, steps, seconds, arguments.batch))
    except KeyboardInterrupt:
        print("interrupted")
    if on_gpu:
        peak, table = torch.cuda.max_memory_allocated() / 2**30, weight.nbytes / 2**30
        print(f"{peak:.1f} GiB of memory at the peak, of which the rows take {table:.1f}")
    print(f"{step.replays:,} of {steps:,} steps were replayed")
    for row in curve:
        row |= {"bayes_loss": loss, "bayes_accuracy": accuracy}
    return curve


@torch.no_grad()
def measured(head: ClassHead, inputs: Tensor, ids: Tensor, steps: int, seconds: float, batch: int) -> dict[str, float]:
    """Return a point of the curve, and print it."""
    started = time.perf_counter()
    loss = float(head.exact_loss(inputs, ids))
    accuracy = float((head.topk(inputs, 1).ids.squeeze(1) == ids).double().mean())
    speed, looked = steps * batch / seconds, time.perf_counter() - started
    print(
        f"step {steps:8,}  {seconds:7.1f} s  {speed:12,.0f} examples/s  held-out loss {loss:7.4f}  "
        f"accuracy {accuracy:.4f}  (measured in {looked:.1f} s)",
        flush=True,
    )
    return {"steps": steps, "seconds": seconds, "examples_per_s": speed, "loss": loss, "accuracy": accuracy}


def write(curve: list[dict[str, float]], problem: Planted, folder: Path) -> None:
    """Write the curve as a table and, if matplotlib is installed, as a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "curves.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["classes", "dim", *curve[0]], lineterminator="\n")
        table.writeheader()
        table.writerows({"classes": problem.classes, "dim": problem.dim, **row} for row in curve)
    try:
        import matplotlib.pyplot as plt
        from matplotlib.ticker import NullFormatter
    except ImportError:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        axis.plot([row["steps"] for row in curve], [row[name] for row in curve], "o-", label="head")
        axis.axhline(curve[0][f"bayes_{name}"], color="black", linestyle="--", label="Bayes optimum")
        axis.set(xscale="log", xlabel="steps", ylabel=f"held-out {name}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.legend(frameon=False)
    figure.suptitle(f"{problem.classes:,} classes, {problem.dim} dimensions")
    figure.savefig(folder / "curves.png", dpi=120)
    plt.close(figure)


def main() -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=100_000_000, help="number of classes")
    parser.add_argument("--dim", type=int, default=128, help="dimensions, a multiple of 32")
    parser.add_argument("--batch", type=int, default=8192, help="examples per step")
    parser.add_argument("--k", type=int, default=8192, help="classes drawn per step")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of training, without evaluations")
    parser.add_argument("--learning-rate", type=float, help="learning rate of the rows (default: 6.5 / dim)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--out", type=Path, help="folder for curves.csv and curves.png")
    arguments = parser.parse_args()
    for name in ("batch", "k"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.dim <= 0 or arguments.dim % 32:
        parser.error(f"--dim must be a multiple of 32, got {arguments.dim}")
    if not arguments.k <= arguments.classes:
        parser.error(f"--classes must be at least --k, {arguments.k}, got {arguments.classes}")
    problem = Planted(arguments.classes, arguments.dim, arguments.device)
    curve = train(problem, arguments)
    if arguments.out is not None and curve:
        write(curve, problem, arguments.out)


if __name__ == "__main__":
    main()
