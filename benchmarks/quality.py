"""Time that sampled training takes to reach the perplexity of three epochs of exact training, on WikiText-2.

    python benchmarks/quality.py                            # the whole, into benchmarks/results/quality.csv
    python benchmarks/quality.py --tokens 50000 --epochs 1  # a part of the text, printed only

The model reads the last five words (64 numbers each, one tanh layer, dropout) and predicts the next of 33,278. All but
the loss is the same for both: initial parameters, batches, Adagrad. Both choose the learning rate from the same grid,
by one pass over a tenth of the text. `Systematic` is trained with each k, then exact training runs, then the best k
runs again, which shows whether the machine's speed changed. Perplexity is exact, over the first 50,000 words of the
validation text, and at the end once over all of it. Seconds exclude evaluation.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from manyclass.data import Text, read_text
from manyclass.lab.study.model import BATCH_SIZE, CONTEXT, ContextBatches, Trained, train_model
from manyclass.training import ProgressLine, Record, evaluate

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402
from benchmarks.machine import provenance, write_csv  # noqa: E402
from benchmarks.plots import TARGET_PERPLEXITY_RATIO  # noqa: E402

RESULTS = ROOT / "results" / "quality.csv"
LEARNING_RATES = (0.0125, 0.025, 0.05, 0.1)
KS = (512, 1024, 2048)
EVALUATIONS_PER_EPOCH = 4
HELD_OUT_TOKENS = 50_000


def train(
    corpus: Text, tokens: Tensor, k: int | None, lr: float, *, epochs: int, points: int = EVALUATIONS_PER_EPOCH
) -> Trained:
    """Train on the tokens with k classes scored, or exactly if k is None."""
    return train_model(
        corpus.train,
        corpus.held_out[:HELD_OUT_TOKENS],
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


def perplexity(record: Record) -> float:
    """Return the held-out perplexity of a record."""
    assert record.held_out_loss is not None
    return math.exp(record.held_out_loss)


def seconds_to(records: tuple[Record, ...], target: float) -> float | None:
    """Return the interpolated time at which the perplexity first reaches the target; None if it never does."""
    for before, after in zip((None, *records), records, strict=False):
        if perplexity(after) <= target:
            if before is None:
                return after.seconds
            share = math.log(perplexity(before) / target) / math.log(perplexity(before) / perplexity(after))
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def best_rate(corpus: Text, k: int | None) -> float:
    """Return the learning rate with the best held-out perplexity after one pass over a tenth of the text."""
    label = "exact" if k is None else f"k = {k}"
    found = {}
    tenth = corpus.train[: max(len(corpus.train) // 10, 2 * BATCH_SIZE)]
    for lr in LEARNING_RATES:
        run = train(corpus, tenth, k, lr, epochs=1, points=1)
        found[lr] = perplexity(run.points[-1])
        print(f"{label:24} rate {lr:<6} {found[lr]:10.2f} {run.points[-1].seconds:9.1f} s", flush=True)
    return min(found, key=found.__getitem__)


def rows(runs: dict[str, Trained], rates: dict[bool, float], examples: int) -> list[dict[str, object]]:
    """Return one row per evaluation."""
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
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=DATA / "wikitext-2", help="folder of train.txt.xz and valid.txt.xz"
    )
    parser.add_argument("--tokens", type=int, default=None, help="words to read of each text (default: all)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of exact training")
    parser.add_argument("--longest", type=int, default=4, help="epochs of sampled training, at most")
    parser.add_argument("--k", type=int, nargs="+", default=list(KS), help="classes to sample")
    parser.add_argument("--sweep-k", type=int, default=512, help="classes to sample while learning rates are chosen")
    parser.add_argument(
        "--out", type=Path, default=None, help="CSV file (default: results/quality.csv, for a whole run)"
    )
    arguments = parser.parse_args()
    if not (arguments.data / "train.txt.xz").exists():
        parser.exit(2, f"quality: {arguments.data} holds no train.txt.xz; set MANYCLASS_DATA or --data\n")
    corpus = read_text(arguments.data)
    corpus = replace(corpus, train=corpus.train[: arguments.tokens], held_out=corpus.held_out[: arguments.tokens])
    print(f"{len(corpus.train):,} words, {corpus.num_classes:,} classes; perplexity and seconds of training:")
    rates = {False: best_rate(corpus, arguments.sweep_k), True: best_rate(corpus, None)}

    runs: dict[str, Trained] = {}
    path = arguments.out or (RESULTS if arguments.tokens is None else None)

    def add(name: str, k: int | None, lr: float, epochs: int) -> Trained:
        runs[name] = run = train(corpus, corpus.train, k, lr, epochs=epochs)
        last = run.points[-1]
        print(f"{name:24} rate {lr:<6} {perplexity(last):10.2f} {last.seconds:9.1f} s", flush=True)
        if path is not None:
            # Write after each run, so that an interruption loses only the current one.
            write_csv(path, rows(runs, rates, len(corpus.train) - CONTEXT))
        return run

    for k in arguments.k:
        add(f"k = {k}", k, rates[False], arguments.longest)
    exact = add("exact", None, rates[True], arguments.epochs)
    target, whole = TARGET_PERPLEXITY_RATIO * perplexity(exact.points[-1]), exact.points[-1].seconds
    reached = {k: seconds for k in arguments.k if (seconds := seconds_to(runs[f"k = {k}"].points, target))}
    print(f"\nexact training takes {whole:.0f} s; to {target:.2f}, 0.5 % above its perplexity:")
    if not reached:
        print(f"no k of {arguments.k} reached it in {arguments.longest} epochs")
    else:
        best = min(reached, key=reached.__getitem__)
        again = f"k = {best}, again"
        run = add(again, best, rates[False], arguments.longest)
        for name in (*(f"k = {k}" for k in reached), again):
            seconds = seconds_to(runs[name].points, target)
            share = "not reached" if seconds is None else f"{seconds:8.1f} s, 1/{whole / seconds:.1f} of exact"
            print(f"{name:24} {share}")
        for name, done in (("exact", exact), (again, run)):
            loss = evaluate(done.head, ContextBatches(corpus.held_out, batch=2048), encoder=done.encoder).loss
            print(f"{name:24} {math.exp(loss):10.2f} over the whole validation text, at its end")
    if path is not None:
        print(f"written to {path}")


if __name__ == "__main__":
    main()
