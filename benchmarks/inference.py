"""Time and memory of finding the ten best classes: exactly, with an index, and with estimated probabilities.

    python benchmarks/inference.py                     # the whole table, into benchmarks/results/inference.csv
    python benchmarks/inference.py --classes 1e5       # a part of it, printed only

A word model is trained on WikiText-2 for half a minute. Its 33,278 class vectors of 128 dimensions are the first size;
the hidden vectors of held-out words are the queries for all sizes. Larger sizes are grown from these vectors
(`grown.py`). Without the text a mixture of clusters replaces the words.

Each contender has a separate process. Memory is the peak beyond the class table. An index is built for a recall of 0.95
on 512 queries; its recall, and the coverage of the intervals for an estimated log Z, are measured on other queries. The
index takes turns with the exact search on the same batch and is compared with it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from manyclass import ClassHead
from manyclass.data import read_text
from manyclass.inference import Index, estimate_log_z, top
from manyclass.samplers import Systematic

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402
from benchmarks.grown import grown_vectors  # noqa: E402
from benchmarks.machine import alternate, free_gib, peak_gib, provenance, quantiles, write_csv  # noqa: E402

RESULTS = ROOT / "results" / "inference.csv"
TEXT = DATA / "wikitext-2"
TRAIN_TOKENS = 1_000_000
K, TOP_K, BATCH_SIZE = 1024, 10, 256
SIZES = [0, 10**5, 10**6, 10**7]  # classes; 0 means the number of words
ROUNDS = 5
COLUMNS = (
    *("batch_ms_p20", "batch_ms", "batch_ms_p80", "queries_per_s", "one_ms", "speed_up", "recall", "beyond_gib"),
    *("build_s", "index_gib", "lists", "probes", "error", "coverage", "note"),
)

Row = dict[str, object]


def word_vectors(text: Path, tokens: int) -> dict[str, Tensor]:
    """Return class vectors, biases and hidden vectors of a word model, or of a mixture without the text."""
    if not text.exists():
        generator = torch.Generator().manual_seed(0)
        label = torch.randint(500, (30_000,), generator=generator)
        weight = torch.randn(500, 128, generator=generator)[label] + torch.randn(30_000, 128, generator=generator)
        bias = -(torch.arange(30_000.0) + 2).log()
        nearby = torch.randint(30_000, (4096,), generator=generator)
        hidden = 0.1 * weight[nearby] + 0.1 * torch.randn(4096, 128, generator=generator)
        return {"weight": 0.5 * weight, "bias": bias, "hidden": hidden}
    from manyclass.lab.study.model import ContextBatches, train_model

    read = read_text(text)
    done = train_model(
        read.train,
        read.held_out[:5000],
        read.num_classes,
        design="systematic, by cluster",
        k=min(512, read.num_classes),
        rate=0.1,
        seed=0,
        epochs=1,
        part=read.train[:tokens],
        points=1,
    )
    encoder, head = done.encoder.eval(), done.head
    assert head.bias is not None
    contexts = next(iter(ContextBatches(read.held_out, batch=8192, seed=0)))[0]
    with torch.no_grad():
        return {"weight": head.weight.detach(), "bias": head.bias.detach(), "hidden": encoder(contexts)}


def grow_head(base: dict[str, Tensor], num_classes: int, similarity: str = "dot") -> ClassHead:
    """Build a head with `num_classes` classes, several for each class of the base."""
    table, biases = grown_vectors(base["weight"], base["bias"], num_classes)
    sampler = Systematic(biases.double().exp(), min(K, num_classes // 2))
    head = ClassHead(
        table.shape[1], num_classes, sampler=sampler, weight=nn.Parameter(table), similarity=similarity
    ).eval()
    assert head.bias is not None
    head.bias.data.copy_(biases)
    return head


def reset_peak() -> float:
    """Reset the process's peak memory and return the memory it holds now."""
    # Writing 5 resets the peak on Linux.
    Path("/proc/self/clear_refs").write_text("5")
    return peak_gib()


def batch_times(batches: dict[str, Callable[[], object]], rounds: int) -> dict[str, Row]:
    """Time batches in turn and return their columns."""
    found: dict[str, Row] = {}
    for name, times in alternate(batches, rounds).items():
        low, median, high = (round(time * 1e3, 3) for time in quantiles(times))
        found[name] = {
            "batch_ms_p20": low,
            "batch_ms": median,
            "batch_ms_p80": high,
            "queries_per_s": round(BATCH_SIZE / median * 1e3, 1),
        }
    return found


def single_query_ms(query: Callable[[], object], repeats: int) -> float:
    """Measure the milliseconds of a single query."""
    return round(statistics.median(alternate({"": query}, repeats)[""]) * 1e3, 3)


def measure_exact(base: dict[str, Tensor], num_classes: int, rounds: int, similarity: str = "dot") -> list[Row]:
    """Measure time and memory of the exact search."""
    head, hidden = grow_head(base, num_classes, similarity), base["hidden"][:BATCH_SIZE]
    before = reset_peak()
    row = batch_times({"": lambda: head.topk(hidden, TOP_K)}, rounds)[""]
    row["beyond_gib"] = round(peak_gib() - before, 3)
    row["one_ms"] = single_query_ms(lambda: head.topk(hidden[:1], TOP_K), rounds)
    name = "exact" if similarity == "dot" else f"exact, {similarity}"
    return [{"contender": name, **row}]


def measure_index(base: dict[str, Tensor], num_classes: int, rounds: int) -> list[Row]:
    """Measure an index and estimates of log Z, and compare each with the exact result."""
    head = grow_head(base, num_classes)
    queries, others = base["hidden"][BATCH_SIZE:].chunk(2)
    before = reset_peak()
    start = time.perf_counter()
    index = Index.build(head, queries)
    taken = time.perf_counter() - start
    report = index.report
    costs = {
        "beyond_gib": round(peak_gib() - before, 3),
        "build_s": round(report.build_s, 2),
        "index_gib": round(report.num_bytes / 2**30, 4),
        "lists": report.lists,
        "probes": report.probes,
    }
    print(f"{report}\n{taken:.1f} s including the measurement of recall", file=sys.stderr)
    hidden = base["hidden"][:BATCH_SIZE]
    searches: dict[str, Callable[[], object]] = {
        "index": lambda: top(head, hidden, TOP_K, index=index, probabilities="none"),
        "index, estimated": lambda: top(head, hidden, TOP_K, index=index, probabilities="estimated"),
    }
    rows = batch_times({"exact": lambda: head.topk(hidden, TOP_K), **searches}, rounds)
    exact = rows.pop("exact")
    for row in rows.values():
        row["speed_up"] = float(f"{float(str(exact['batch_ms'])) / float(str(row['batch_ms'])):.3g}")
        row.update(costs)
    fresh = others[:BATCH_SIZE]
    rows["index"]["recall"] = round(index.recall(fresh, TOP_K), 4)
    rows["index"]["one_ms"] = single_query_ms(lambda: index.search(hidden[:1], TOP_K), 20)
    with torch.no_grad():
        log_z = head.log_z(fresh)
    _, explicit = index.nearest(fresh, 128, probe_factor=8)
    estimates = [
        estimate_log_z(head, fresh, explicit=explicit, generator=torch.Generator().manual_seed(i)) for i in range(20)
    ]
    covered = [((estimate.log_z - log_z).abs() <= estimate.error).double().mean() for estimate in estimates]
    found = top(head, fresh, TOP_K, index=index, probabilities="estimated").ids
    best = head.topk(fresh, TOP_K).ids
    rows["index, estimated"] |= {
        "recall": round(float((best.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean()), 4),
        "error": round(float(torch.stack([estimate.error for estimate in estimates]).median()), 4),
        "coverage": round(float(torch.stack(covered).mean()), 3),
    }
    return [{"contender": name, **row} for name, row in rows.items()]


PROCESSES: dict[str, Callable[[dict[str, Tensor], int, int], list[Row]]] = {
    "exact": measure_exact,
    "exact, cosine": lambda base, num_classes, rounds: measure_exact(base, num_classes, rounds, "cosine"),
    "index": measure_index,
}
# Class tables that each process holds at its peak.
PEAK_TABLES = {"exact": 1.3, "exact, cosine": 1.3, "index": 2.2}


def run(name: str, num_classes: int, rounds: int, folder: Path) -> list[Row]:
    """Run a contender in a separate process and return its rows."""
    command = [sys.executable, __file__, "--process", name, "--classes", num_classes, "--rounds", rounds]
    done = subprocess.run([*map(str, command), "--folder", str(folder)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return [{"contender": name, "note": f"ended with {done.returncode}"}]
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=SIZES, type=lambda size: int(float(size)), metavar="C")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--data", type=Path, default=TEXT, help="folder of a text to train on")
    parser.add_argument("--tokens", type=int, default=TRAIN_TOKENS, help="training tokens")
    parser.add_argument(
        "--out", type=Path, default=None, help="CSV file (default: results/inference.csv, for a whole run)"
    )
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        base = torch.load(arguments.folder / "words.pt", weights_only=True)
        print(json.dumps(PROCESSES[arguments.process](base, arguments.classes[0], arguments.rounds)))
        return
    whole = (arguments.classes, arguments.rounds, arguments.tokens) == (SIZES, ROUNDS, TRAIN_TOKENS)
    path = arguments.out or (RESULTS if whole else None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        base = word_vectors(arguments.data, arguments.tokens)
        torch.save(base, Path(folder) / "words.pt")
        own, dim = base["weight"].shape
        del base
        vectors = arguments.data.name if arguments.data.exists() else "mixture"
        for size in arguments.classes:
            num_classes = size or own
            source = vectors if num_classes == own else f"grown from {vectors}"
            print(f"\n{num_classes:,} classes, {source}")
            print(
                f"{'':20}{'ms/batch':>12}{'queries/s':>12}{'ms/query':>10}{'speed-up':>9}{'recall':>8}{'GiB':>8}"
                f"{'build s':>9}{'lists':>14}{'error':>8}{'covers':>7}"
            )
            for name in PROCESSES:
                gib = PEAK_TABLES[name] * num_classes * dim * 4 / 2**30
                if gib > 0.9 * free_gib():
                    part: list[Row] = [{"contender": name, "note": f"would need {gib:.0f} GiB"}]
                else:
                    part = run(name, num_classes, arguments.rounds, Path(folder))
                for row in part:
                    about = {"contender": row.pop("contender"), "vectors": source, "num_classes": num_classes}
                    row = {
                        **about,
                        "dim": dim,
                        "batch": BATCH_SIZE,
                        **dict.fromkeys(COLUMNS, ""),
                        **row,
                        **provenance(),
                    }
                    rows.append(row)
                    searched = f"{row['probes']} of {row['lists']}" if row["lists"] else ""
                    print(
                        f"{row['contender']:20}{row['batch_ms']:>12}{row['queries_per_s']:>12}{row['one_ms']:>10}"
                        f"{row['speed_up']:>9}{row['recall']:>8}{row['beyond_gib']:>8}{row['build_s']:>9}"
                        f"{searched:>14}{row['error']:>8}{row['coverage']:>7}  {row['note']}".rstrip(),
                        flush=True,
                    )
                if path is not None:
                    # Write after each contender, so that an interruption loses only the current one.
                    write_csv(path, rows)
    if path is not None:
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
