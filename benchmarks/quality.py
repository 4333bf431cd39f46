"""How long sampled training takes to the perplexity that exact training reaches in three epochs, on WikiText-2.

    python benchmarks/quality.py                            # the whole, into benchmarks/results/quality.csv
    python benchmarks/quality.py --tokens 50000 --epochs 1  # a part of the text, printed only

The model reads the last five words (64 numbers each, one layer of tanh, dropout) and predicts the next of 33,278.
Everything but the loss is the same on both sides: first parameters, batches, Adagrad. Learning rates are chosen alike,
from one grid, by one pass over a tenth of the text. `Systematic` is trained with each k, then exact training runs, then
the best k again, so that a change of the machine's mood shows. Perplexity is exact, over the first 50,000 words of the
validation text, and at the end once over all of it. Seconds are those of training alone.
"""

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from manyclass import ClassHead
from manyclass.data import Text, read_text
from manyclass.lab.study.model import BATCH, CONTEXT, Encoder, Windows, train_model
from manyclass.training import ProgressLine, Record, evaluate

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402
from benchmarks.machine import provenance, write_csv  # noqa: E402
from benchmarks.plots import CLOSE  # noqa: E402

RESULTS = ROOT / "results" / "quality.csv"
RATES = (0.0125, 0.025, 0.05, 0.1)
KS = (512, 1024, 2048)
POINTS = 4  # evaluations in an epoch
HELD_OUT = 50_000


@dataclass(frozen=True)
class Run:
    """One training: its evaluations, and the parts that it trained."""

    points: tuple[Record, ...]
    encoder: Encoder
    head: ClassHead

    @property
    def perplexity(self) -> float:
        return perplexity(self.points[-1])


def train(corpus: Text, tokens: Tensor, k: int | None, lr: float, *, epochs: int, points: int = POINTS) -> Run:
    """Train on the tokens; without k exactly."""
    done = train_model(
        corpus.train,
        corpus.held_out[:HELD_OUT],
        corpus.num_classes,
        design=None if k is None else "systematic",
        k=k or 0,
        rate=lr,
        seed=0,
        epochs=epochs,
        part=tokens,
        points=points,
        callbacks=[ProgressLine()] if sys.stderr.isatty() else [],
    )
    return Run(done.points, done.encoder, done.head)


def perplexity(record: Record) -> float:
    assert record.held_out_loss is not None
    return math.exp(record.held_out_loss)


def seconds_to(records: tuple[Record, ...], target: float) -> float | None:
    """When the perplexity first came below the target, between the two points that tell; None: it did not."""
    for before, after in zip((None, *records), records, strict=False):
        if perplexity(after) <= target:
            if before is None:
                return after.seconds
            share = math.log(perplexity(before) / target) / math.log(perplexity(before) / perplexity(after))
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def best_rate(corpus: Text, k: int | None) -> float:
    """The rate of the grid with the best held-out perplexity after one pass over a tenth of the text."""
    label = "exact" if k is None else f"k = {k}"
    found = {}
    tenth = corpus.train[: max(len(corpus.train) // 10, 2 * BATCH)]
    for lr in RATES:
        run = train(corpus, tenth, k, lr, epochs=1, points=1)
        found[lr] = run.perplexity
        print(f"{label:24} rate {lr:<6} {run.perplexity:10.2f} {run.points[-1].seconds:9.1f} s", flush=True)
    return min(found, key=found.__getitem__)


def rows(runs: dict[str, Run], rates: dict[bool, float], examples: int) -> list[dict[str, object]]:
    """A row for each evaluation."""
    return [
        {
            "run": name,
            "lr": rates[name == "exact"],
            "step": point.step,
            "epochs": round(point.examples / examples, 3),
            "seconds": round(point.seconds, 3),
            "perplexity": round(perplexity(point), 3),
            **provenance(),
        }
        for name, run in runs.items()
        for point in run.points
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=DATA / "wikitext-2", help="folder of train.txt.xz and valid.txt.xz"
    )
    parser.add_argument("--tokens", type=int, default=None, help="how many to read of each text (default: all)")
    parser.add_argument("--epochs", type=int, default=3, help="of exact training")
    parser.add_argument("--longest", type=int, default=4, help="epochs of sampled training, at most")
    parser.add_argument("--k", type=int, nargs="+", default=list(KS), help="classes to sample")
    parser.add_argument("--sweep-k", type=int, default=512, help="classes to sample while rates are chosen")
    parser.add_argument("--out", type=Path, default=None, help="CSV file (default: the kept one, for a whole run)")
    arguments = parser.parse_args()
    if not (arguments.data / "train.txt.xz").exists():
        parser.exit(2, f"quality: {arguments.data} holds no train.txt.xz; MANYCLASS_DATA or --data says where it is\n")
    corpus = read_text(arguments.data)
    corpus = replace(corpus, train=corpus.train[: arguments.tokens], held_out=corpus.held_out[: arguments.tokens])
    print(f"{len(corpus.train):,} words, {corpus.num_classes:,} classes; perplexity and seconds of training:")
    rates = {False: best_rate(corpus, arguments.sweep_k), True: best_rate(corpus, None)}

    runs: dict[str, Run] = {}
    path = arguments.out or (RESULTS if arguments.tokens is None else None)

    def add(name: str, k: int | None, lr: float, epochs: int) -> Run:
        runs[name] = run = train(corpus, corpus.train, k, lr, epochs=epochs)
        print(f"{name:24} rate {lr:<6} {run.perplexity:10.2f} {run.points[-1].seconds:9.1f} s", flush=True)
        if path is not None:
            # After each run: who stops this keeps what is done.
            write_csv(path, rows(runs, rates, len(corpus.train) - CONTEXT))
        return run

    for k in arguments.k:
        add(f"k = {k}", k, rates[False], arguments.longest)
    exact = add("exact", None, rates[True], arguments.epochs)
    target, whole = CLOSE * exact.perplexity, exact.points[-1].seconds
    reached = {k: seconds for k in arguments.k if (seconds := seconds_to(runs[f"k = {k}"].points, target))}
    print(f"\nexact training takes {whole:.0f} s; to {target:.2f}, 0.5 % above its perplexity:")
    if not reached:
        print(f"no k of {arguments.k} came there in {arguments.longest} epochs")
    else:
        best = min(reached, key=reached.__getitem__)
        again = f"k = {best}, again"
        run = add(again, best, rates[False], arguments.longest)
        for name in (*(f"k = {k}" for k in reached), again):
            seconds = seconds_to(runs[name].points, target)
            share = "not reached" if seconds is None else f"{seconds:8.1f} s, 1/{whole / seconds:.1f} of exact"
            print(f"{name:24} {share}")
        for name, done in (("exact", exact), (again, run)):
            loss = evaluate(done.head, Windows(corpus.held_out, batch=2048), encoder=done.encoder).loss
            print(f"{name:24} {math.exp(loss):10.2f} over the whole validation text, at its end")
    if path is not None:
        print(f"written to {path}")


if __name__ == "__main__":
    main()
