"""What it takes to find the ten best classes: exactly, with an index, and with probabilities from a few draws.

    python benchmarks/inference.py                     # the whole table, into benchmarks/results/inference.csv
    python benchmarks/inference.py --classes 1e5       # a part of it, printed only

First a word model is trained on WikiText-2 for half a minute: its 33,278 class vectors of 128 dimensions are one size,
and the hidden vectors of held-out words are the queries of all. More classes are grown from those: each word splits
into as many as it takes, its vector plus noise of half its length, its bias less the log of their number and less for
some than for others. Where the text is missing, a mixture of clusters stands for the words.

Each contender has a process of its own. Memory is what it takes at its peak beyond the class table. An index is built
for a recall of 0.95 with 512 queries; its recall, and how often the interval of an estimated log Z holds the exact
one, are of others. It takes turns with the exact search, on the same batch, and is compared with that.
"""

import argparse
import json
import math
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
from benchmarks.machine import alternate, free_gib, peak_gib, provenance, quantiles, write_csv  # noqa: E402

RESULTS = ROOT / "results" / "inference.csv"
TEXT = DATA / "wikitext-2"
TOKENS = 1_000_000
K, BEST, BATCH = 1024, 10, 256
SIZES = [0, 10**5, 10**6, 10**7]  # 0: as many as there are words
ROUNDS = 5
CHUNK = 1 << 16
COLUMNS = (
    *("batch_ms_p20", "batch_ms", "batch_ms_p80", "queries_per_s", "one_ms", "speed_up", "recall", "beyond_gib"),
    *("build_s", "index_gib", "lists", "probes", "error", "coverage", "note"),
)

Row = dict[str, object]


def words(text: Path, tokens: int) -> dict[str, Tensor]:
    """Class vectors, biases and hidden vectors of a word model, or of what stands for one."""
    if not text.exists():
        generator = torch.Generator().manual_seed(0)
        label = torch.randint(500, (30_000,), generator=generator)
        weight = torch.randn(500, 128, generator=generator)[label] + torch.randn(30_000, 128, generator=generator)
        bias = -(torch.arange(30_000.0) + 2).log()
        about = torch.randint(30_000, (4096,), generator=generator)
        hidden = 0.1 * weight[about] + 0.1 * torch.randn(4096, 128, generator=generator)
        return {"weight": 0.5 * weight, "bias": bias, "hidden": hidden}
    from manyclass.lab.study.model import Windows, train_model

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
    contexts = next(iter(Windows(read.held_out, batch=8192, seed=0)))[0]
    with torch.no_grad():
        return {"weight": head.weight.detach(), "bias": head.bias.detach(), "hidden": encoder(contexts)}


def grown(base: dict[str, Tensor], num_classes: int, similarity: str = "dot") -> ClassHead:
    """A head with so many classes, of which each of the base's is a family."""
    weight, bias = base["weight"], base["bias"]
    table, biases = torch.empty(num_classes, weight.shape[1]), torch.empty(num_classes)
    generator = torch.Generator().manual_seed(1)
    families = num_classes / len(weight)
    for start in range(0, num_classes, CHUNK):
        ids = torch.arange(start, min(start + CHUNK, num_classes))
        word, noise = ids % len(weight), torch.randn(len(ids), weight.shape[1], generator=generator)
        length = weight[word].norm(dim=1, keepdim=True) * (0.5 / math.sqrt(weight.shape[1]))
        less = math.log(max(1.0, families)) + torch.randn(len(ids), generator=generator).abs()
        first = ids < len(weight)
        table[start : start + CHUNK] = weight[word] + noise * length.masked_fill(first.unsqueeze(1), 0)
        biases[start : start + CHUNK] = bias[word] - less.masked_fill(first, 0)
    sampler = Systematic(biases.double().exp(), min(K, num_classes // 2))
    head = ClassHead(
        weight.shape[1], num_classes, sampler=sampler, weight=nn.Parameter(table), similarity=similarity
    ).eval()
    assert head.bias is not None
    head.bias.data.copy_(biases)
    return head


def forget_peak() -> float:
    """Memory held now; from here on a peak is one of what follows."""
    # Linux counts anew when it is told so.
    Path("/proc/self/clear_refs").write_text("5")
    return peak_gib()


def timed(batches: dict[str, Callable[[], object]], rounds: int) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for name, times in alternate(batches, rounds).items():
        low, median, high = (round(time * 1e3, 3) for time in quantiles(times))
        found[name] = {
            "batch_ms_p20": low,
            "batch_ms": median,
            "batch_ms_p80": high,
            "queries_per_s": round(BATCH / median * 1e3, 1),
        }
    return found


def one_ms(query: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a single query."""
    return round(statistics.median(alternate({"": query}, repeats)[""]) * 1e3, 3)


def exact(base: dict[str, Tensor], num_classes: int, rounds: int, similarity: str = "dot") -> list[Row]:
    """Times and memory of the exact search."""
    head, hidden = grown(base, num_classes, similarity), base["hidden"][:BATCH]
    before = forget_peak()
    row = timed({"": lambda: head.topk(hidden, BEST)}, rounds)[""]
    row["beyond_gib"] = round(peak_gib() - before, 3)
    row["one_ms"] = one_ms(lambda: head.topk(hidden[:1], BEST), rounds)
    name = "exact" if similarity == "dot" else f"exact, {similarity}"
    return [{"contender": name, **row}]


def indexed(base: dict[str, Tensor], num_classes: int, rounds: int) -> list[Row]:
    """An index, and estimates beside it, each compared with what is exact."""
    head = grown(base, num_classes)
    queries, others = base["hidden"][BATCH:].chunk(2)
    before = forget_peak()
    start = time.perf_counter()
    index = Index.build(head, queries)
    taken = time.perf_counter() - start
    report = index.report
    held = {
        "beyond_gib": round(peak_gib() - before, 3),
        "build_s": round(report.build_s, 2),
        "index_gib": round(report.num_bytes / 2**30, 4),
        "lists": report.lists,
        "probes": report.probes,
    }
    print(f"{report}\n{taken:.1f} s with measuring", file=sys.stderr)
    hidden = base["hidden"][:BATCH]
    searches: dict[str, Callable[[], object]] = {
        "index": lambda: top(head, hidden, BEST, index=index, probabilities="none"),
        "index, estimated": lambda: top(head, hidden, BEST, index=index, probabilities="estimated"),
    }
    rows = timed({"exact": lambda: head.topk(hidden, BEST), **searches}, rounds)
    beside = rows.pop("exact")
    for row in rows.values():
        row["speed_up"] = float(f"{float(str(beside['batch_ms'])) / float(str(row['batch_ms'])):.3g}")
        row.update(held)
    few = others[:BATCH]
    rows["index"]["recall"] = round(index.recall(few, BEST), 4)
    rows["index"]["one_ms"] = one_ms(lambda: index.search(hidden[:1], BEST), 20)
    with torch.no_grad():
        log_z = head.log_z(few)
    _, explicit = index.nearest(few, 128, thorough=8)
    estimates = [
        estimate_log_z(head, few, explicit=explicit, generator=torch.Generator().manual_seed(i)) for i in range(20)
    ]
    right = [((estimate.log_z - log_z).abs() <= estimate.error).double().mean() for estimate in estimates]
    found = top(head, few, BEST, index=index, probabilities="estimated").ids
    best = head.topk(few, BEST).ids
    rows["index, estimated"] |= {
        "recall": round(float((best.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean()), 4),
        "error": round(float(torch.stack([estimate.error for estimate in estimates]).median()), 4),
        "coverage": round(float(torch.stack(right).mean()), 3),
    }
    return [{"contender": name, **row} for name, row in rows.items()]


PROCESSES: dict[str, Callable[[dict[str, Tensor], int, int], list[Row]]] = {
    "exact": exact,
    "exact, cosine": lambda base, num_classes, rounds: exact(base, num_classes, rounds, "cosine"),
    "index": indexed,
}
# Class tables held at once, at most.
TABLES = {"exact": 1.3, "exact, cosine": 1.3, "index": 2.2}


def run(name: str, num_classes: int, rounds: int, folder: Path) -> list[Row]:
    """A contender's rows, from a process of its own."""
    command = [sys.executable, __file__, "--process", name, "--classes", num_classes, "--rounds", rounds]
    done = subprocess.run([*map(str, command), "--folder", str(folder)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return [{"contender": name, "note": f"ended with {done.returncode}"}]
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=SIZES, type=lambda size: int(float(size)), metavar="C")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--data", type=Path, default=TEXT, help="a folder with a text to train on")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of it to train on")
    parser.add_argument("--out", type=Path, default=None, help="CSV file (default: the kept one, for a whole run)")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        base = torch.load(arguments.folder / "words.pt", weights_only=True)
        print(json.dumps(PROCESSES[arguments.process](base, arguments.classes[0], arguments.rounds)))
        return
    whole = (arguments.classes, arguments.rounds, arguments.tokens) == (SIZES, ROUNDS, TOKENS)
    path = arguments.out or (RESULTS if whole else None)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        base = words(arguments.data, arguments.tokens)
        torch.save(base, Path(folder) / "words.pt")
        own, dim = base["weight"].shape
        del base
        vectors = arguments.data.name if arguments.data.exists() else "mixture"
        for size in arguments.classes:
            num_classes = size or own
            said = vectors if num_classes == own else f"grown from {vectors}"
            print(f"\n{num_classes:,} classes, {said}")
            print(
                f"{'':20}{'ms a batch':>12}{'queries/s':>12}{'ms, one':>10}{'× exact':>9}{'recall':>8}{'GiB':>8}"
                f"{'build s':>9}{'searched':>14}{'error':>8}{'held':>7}"
            )
            for name in PROCESSES:
                gib = TABLES[name] * num_classes * dim * 4 / 2**30
                if gib > 0.9 * free_gib():
                    part: list[Row] = [{"contender": name, "note": f"would need {gib:.0f} GiB"}]
                else:
                    part = run(name, num_classes, arguments.rounds, Path(folder))
                for row in part:
                    about = {"contender": row.pop("contender"), "vectors": said, "num_classes": num_classes}
                    row = {**about, "dim": dim, "batch": BATCH, **dict.fromkeys(COLUMNS, ""), **row, **provenance()}
                    rows.append(row)
                    searched = f"{row['probes']} of {row['lists']}" if row["lists"] else ""
                    print(
                        f"{row['contender']:20}{row['batch_ms']:>12}{row['queries_per_s']:>12}{row['one_ms']:>10}"
                        f"{row['speed_up']:>9}{row['recall']:>8}{row['beyond_gib']:>8}{row['build_s']:>9}"
                        f"{searched:>14}{row['error']:>8}{row['coverage']:>7}  {row['note']}".rstrip(),
                        flush=True,
                    )
                if path is not None:
                    # After each contender: who stops this keeps what is done.
                    write_csv(path, rows)
    if path is not None:
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
