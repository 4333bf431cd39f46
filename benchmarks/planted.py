"""Planted problems, whose likelihood is known: does the default decide rightly, and does its probe tell the truth?

    python benchmarks/planted.py                               # all, into benchmarks/results/planted.csv
    python benchmarks/planted.py --problems sharp --steps 300  # one of them, shorter

In each problem the next class depends on the last one, here called the context:

- flat: half of the next classes are any of the 50,000, the other half any of the context's own 1 in 64.
- zipf: the same, with frequencies 1/(rank + 2).
- sharp: nine in ten next classes are the one that follows the context in a permutation of 50,000, the others any class.

The vectors of contexts are fixed and random, so the class vectors alone learn, from new examples in every step. Designs
are trained from the same parameters with the same examples. The table shows, for each: held-out loss in nats (the
entropy is the lowest possible), milliseconds per step, the true error of log Z̃ over whole batches and many draws, what
the probe says of the same parameters (the root mean square of four pools, and their range), and whether the training
warned. Right is: the default within 1 % of exact training's loss, its
design the cheapest of those whose true error is below 0.15, the probe within a quarter of the truth.
"""

import argparse
import logging
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.designs import append, describe, device_name, true_error  # noqa: E402
from benchmarks.machine import provenance  # noqa: E402
from manyclass import ClassCounts, ClassHead  # noqa: E402
from manyclass.optim import RowAdagrad  # noqa: E402
from manyclass.registry import make_sampler  # noqa: E402
from manyclass.samplers.error_probe import POOLED_PROBES, ErrorProbe  # noqa: E402
from manyclass.training import Training, evaluate  # noqa: E402

RESULTS = ROOT / "results" / "planted.csv"
NUM_CLASSES = 50_000
DIM = 64
BATCH = 512
TOPICS = 64  # contexts of the problems flat and zipf
OWN_SHARE, FOLLOWING_SHARE = 0.5, 0.9
HELD_OUT_BATCHES = 16
TRUE_ERROR_DRAWS = 8
PROBED_POOLS = 4
TIMED_STEPS = 0.5  # of the training: the first half may still change its design
Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    """A law of the next class.

    Args:
        contexts: number of contexts.
        frequency: float64 [C], the frequency of each class.
        draw: returns contexts [n] and next classes [n] for a number n and a generator.
        entropy: the mean of -log p, the lowest possible loss.
    """

    contexts: int
    frequency: Tensor
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    entropy: float


def topics(frequency: Tensor) -> Problem:
    """Return a problem in which half of the classes are drawn by frequency, half so among those of the context."""
    num_classes = len(frequency)
    place = torch.arange(num_classes)
    own = torch.zeros(TOPICS, dtype=torch.float64).index_add_(0, place % TOPICS, frequency)
    # Of a context's classes: the running sum, which searchsorted inverts.
    sums = [frequency[topic::TOPICS].cumsum(0) for topic in range(TOPICS)]
    whole = frequency.cumsum(0)

    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        context = torch.randint(TOPICS, (n,), generator=generator)
        uniform = torch.rand(n, generator=generator, dtype=torch.float64)
        found = torch.searchsorted(whole, uniform * whole[-1])
        is_own = torch.rand(n, generator=generator) < OWN_SHARE
        for topic in range(TOPICS):
            chosen = is_own & (context == topic)
            inside = torch.searchsorted(sums[topic], uniform[chosen] * sums[topic][-1])
            found[chosen] = topic + TOPICS * inside
        return context, found.clamp(max=num_classes - 1)

    # A class c of topic t has p(c|t) = f(1 - a) + f a/own(t), and p(c|other) = f(1 - a).
    inside = frequency * (1 - OWN_SHARE + OWN_SHARE / own[place % TOPICS])
    outside = frequency * (1 - OWN_SHARE)
    entropy = -float((inside * inside.log()).sum() + (TOPICS - 1) * (outside * outside.log()).sum()) / TOPICS
    return Problem(TOPICS, frequency, draw, entropy)


def flat(num_classes: int) -> Problem:
    """Return a problem of equal frequencies."""
    return topics(torch.full((num_classes,), 1 / num_classes, dtype=torch.float64))


def zipf(num_classes: int) -> Problem:
    """Return a problem of frequencies by Zipf's law."""
    weight = 1 / (torch.arange(num_classes, dtype=torch.float64) + 2)
    return topics(weight / weight.sum())


def sharp(num_classes: int) -> Problem:
    """Return a problem in which a class is nearly always followed by the same other one."""
    following = torch.randperm(num_classes, generator=torch.Generator().manual_seed(1))

    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        context = torch.randint(num_classes, (n,), generator=generator)
        other = torch.randint(num_classes, (n,), generator=generator)
        follows = torch.rand(n, generator=generator) < FOLLOWING_SHARE
        return context, torch.where(follows, following[context], other)

    rest = (1 - FOLLOWING_SHARE) / num_classes
    top = FOLLOWING_SHARE + rest
    entropy = -top * math.log(top) - (num_classes - 1) * rest * math.log(rest)
    return Problem(num_classes, torch.full((num_classes,), 1 / num_classes, dtype=torch.float64), draw, entropy)


PROBLEMS: dict[str, Callable[[int], Problem]] = {"flat": flat, "zipf": zipf, "sharp": sharp}
# Steps, chosen so that exact training comes close to the entropy.
STEPS = {"flat": 300, "zipf": 300, "sharp": 900}
RATES = {"flat": 0.01, "zipf": 0.02, "sharp": 0.1}
DESIGNS = ("exact", "learned:1024", "tailored:1024", "default")


class Stream:
    """New batches of a problem, the same for each seed; every epoch has others."""

    def __init__(self, problem: Problem, batches: int, *, seed: int) -> None:
        self._problem, self._batches, self._seed = problem, batches, seed

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(self._batches):
            yield self._problem.draw(BATCH, generator)


def train(name: str, problem: Problem, design: str, *, steps: int, device: str) -> Row:
    """Train a design and return what it came to."""
    num_classes = len(problem.frequency)
    torch.manual_seed(0)
    vectors = torch.randint(2, (problem.contexts, DIM)).float() * 2 - 1
    encoder: nn.Module = nn.Embedding.from_pretrained(vectors, freeze=True).to(device)
    kind, _, k = design.partition(":")
    counts = ClassCounts(problem.frequency * BATCH * steps + 1)
    sampler = make_sampler(None if kind == "default" else kind, counts, k=int(k) if k else None)
    head = ClassHead(DIM, num_classes, counts=counts, sampler=sampler, sparse=True)
    nn.init.zeros_(head.weight)
    head.to(device)
    optimizer = RowAdagrad(head.parameters(), RATES[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = Training(
            head, Stream(problem, steps, seed=0), optimizer, encoder=encoder, epochs=1, report_every=max(1, steps // 10)
        ).run()
    held_out = list(Stream(problem, HELD_OUT_BATCHES, seed=1))
    loss = evaluate(head, held_out, encoder=encoder).loss
    # The truth first: probes are training steps, after which the default may decide again.
    error = true_error(head, encoder, held_out, draws=TRUE_ERROR_DRAWS)
    decided = describe(head.sampler)
    probed = probed_errors(head, encoder, list(Stream(problem, PROBED_POOLS * POOLED_PROBES, seed=2)))
    half = next(record for record in history.records if record.step >= TIMED_STEPS * steps)
    errors = [record.rmse_log_z for record in history.records if record.rmse_log_z is not None]
    return {
        "problem": name,
        "classes": num_classes,
        "design": design,
        "device": device_name(device),
        "steps": steps,
        "entropy": round(problem.entropy, 4),
        "held_out_loss": round(loss, 4),
        "ms_per_step": round(1000 * (history.progress.seconds - half.seconds) / max(1, steps - half.step), 2),
        "seconds": round(history.progress.seconds, 2),
        "logged_error": round(errors[-1], 4) if errors else "",
        "true_error": round(error, 4),
        "probe_error": round(math.sqrt(statistics.fmean(error**2 for error in probed)), 4),
        "lowest_probe": round(min(probed), 4),
        "highest_probe": round(max(probed), 4),
        "decided": decided,
        "decisions": " / ".join(getattr(head.sampler, "decisions", [])),
        "warned": " / ".join(dict.fromkeys(str(warning.message) for warning in caught)),
        **provenance(),
    }


def probed_errors(head: ClassHead, encoder: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Return what the probe says, pooled over eight of the batches at a time, with the parameters as they are.

    Each pass is a training step without an update, so that the probes see the parameters that `true_error` sees.
    """
    found = []
    device = head.weight.device
    for first in range(0, len(batches), POOLED_PROBES):
        probe = ErrorProbe(every=1)
        head.extra_probes.append(probe)
        for context, target in batches[first : first + POOLED_PROBES]:
            head(encoder(context.to(device)), target.to(device))
        head.extra_probes.remove(probe)
        found.append(probe.error or 0.0)
    return found


def shown(row: Row, rows: Sequence[Row]) -> str:
    """Return a line about a design, with its loss relative to that of exact training."""
    exact = next((other["held_out_loss"] for other in rows if other["design"] == "exact"), None)
    ratio = "–" if exact is None else f"{row['held_out_loss'] / exact:.4f}"
    probed, true = row["probe_error"], row["true_error"]
    honest = (
        f"{probed / true:.2f} ({row['lowest_probe'] / true:.2f} to {row['highest_probe'] / true:.2f})" if true else "–"
    )
    return (
        f"{row['problem']:7}{row['design']:15} loss {row['held_out_loss']:8.4f} (entropy {row['entropy']}), / exact "
        f"{ratio}, {row['ms_per_step']:8.2f} ms a step, error {true:.3f}, probe / truth {honest}, {row['decided']}"
        f"{', warned' if row['warned'] else ''}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), metavar="NAME", help="default, or sampler[:k]")
    parser.add_argument("--classes", type=int, default=NUM_CLASSES)
    parser.add_argument("--steps", type=int, help="steps of training (default: 300; sharp: 900)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of the CPU (default: torch's)")
    parser.add_argument(
        "--out", type=Path, help="CSV file to append to (default: results/planted.csv, for a whole run)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    whole = arguments.steps is None and arguments.classes == NUM_CLASSES
    path = arguments.out or (RESULTS if whole else None)
    for name in arguments.problems:
        problem = PROBLEMS[name](arguments.classes)
        rows: list[Row] = []
        for design in arguments.designs:
            steps = arguments.steps or STEPS[name]
            rows.append(train(name, problem, design, steps=steps, device=arguments.device))
            print(shown(rows[-1], rows), flush=True)
            if path is not None:
                append(path, rows[-1])


if __name__ == "__main__":
    main()
