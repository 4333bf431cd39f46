"""Held-out perplexity by seconds of training, for each design: which of them is best after equal time?

    python benchmarks/frontier.py                    # nowplaying, wikitext-2, tmall-part into results/frontier.csv
    python benchmarks/frontier.py --device cuda --seconds 20
    python benchmarks/frontier.py --sets tmall-part  # 14,981 classes
    python benchmarks/frontier.py --plot             # the CSV file into results/frontier-….svg and .png

`nowplaying` and `wikitext-2` are trained as `manyclass fit --seconds` does, with a constant learning rate; one training
runs at a time. `tmall-part` is the first 16,000 training sessions of tmall, of which every twentieth is held out: a GRU
of 48 units reads the last 10 items and shares their vectors with the head, batches have 512 examples. Adagrad updates
the items' vectors: Adam's steps depend on how often a row is drawn. The first design, exact training, runs for a number
of epochs, and the others as long as that. The table shows when each design first comes to 1.01 times the perplexity of
exact training's best evaluation.

A design is `default`, or the name of a sampler, or `name:k`. On `tmall-part`, `name:k+session` also includes the items
of the session and the 8 items that most often follow its last one, for each example. Seconds exclude evaluations.
"""

import argparse
import itertools
import logging
import lzma
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402
from benchmarks.designs import (  # noqa: E402
    append,
    describe,
    design_settings,
    device_name,
    read_rows,
    true_error,
)
from benchmarks.machine import provenance  # noqa: E402
from benchmarks.real_data import DATA_SETS  # noqa: E402
from manyclass import ClassCounts, ClassHead, tasks  # noqa: E402
from manyclass.optim import RowAdagrad  # noqa: E402
from manyclass.registry import make_sampler  # noqa: E402
from manyclass.training import HeldOut, Record, Training  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = ROOT / "results" / "frontier.csv"
PART = "tmall-part"
SETS = ("nowplaying", "wikitext-2", PART)
DESIGNS = (
    "exact",
    "default",
    "tailored:1024",
    "tailored:2048",
    "tailored:4096",
    "learned:1024",
    "learned:4096",
    "clustered:256",
)
PART_SESSIONS = 16_000
PART_EPOCHS, PART_BATCH, PART_DIM, PART_ITEMS = 6, 512, 48, 10
ROW_RATE, GRU_RATE = 0.1, 0.01
INCLUDING, NEIGHBOURS = "+session", 8
TARGET_RATIO = 1.01  # to the perplexity of exact training's best evaluation
Row = dict[str, Any]

# Colours of Okabe and Ito, distinguishable by colour-blind readers; the default is the strongest, exact black.
STYLES = {
    "exact": ("exact", "#000000", "--"),
    "default": ("the default", "#D55E00", "-"),
    "tailored:1024": ("Tailored, k = 1,024", "#56B4E9", "-"),
    "tailored:2048": ("Tailored, k = 2,048", "#0072B2", ":"),
    "tailored:4096": ("Tailored, k = 4,096", "#0072B2", "-"),
    "learned:1024": ("Learned, k = 1,024", "#009E73", ":"),
    "learned:4096": ("Learned, k = 4,096", "#009E73", "-"),
    "clustered:256": ("Clustered, k = 256", "#CC79A7", "-"),
    "tailored:1024+session": ("Tailored, k = 1,024, session included", "#56B4E9", ":"),
}


class SessionBatches:
    """Shuffled batches of the last items of a session [B, T], padded with -1 in front, and the item that follows.

    Args:
        pairs: items before and the item after.
        size: B.
        seed: seed of the order. None: not shuffled.
        neighbours: [C, N], -1 pads: items that follow each item. If given, an example includes those of its last item,
            and the items of its session.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[list[int], int]],
        size: int,
        *,
        seed: int | None,
        neighbours: Tensor | None = None,
    ) -> None:
        rows = [[-1] * (PART_ITEMS - len(before)) + before for before, _ in pairs]
        self._before, self._after = torch.tensor(rows), torch.tensor([after for _, after in pairs])
        self._size, self._seed, self._epoch = size, seed, 0
        self._neighbours = neighbours

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._after) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        order = torch.arange(len(self._after))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
            order = torch.randperm(len(order), generator=generator)
        for part in order.split(self._size):
            before = self._before[part]
            extras = {}
            if self._neighbours is not None:
                extras["include"] = torch.cat([before, self._neighbours[before[:, -1]]], 1)
            yield before, self._after[part], extras


class LastItems(nn.Module):
    """A GRU over the last items of a session, whose vectors the head shares; the vector after the last one."""

    def __init__(self, num_items: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_items, dim, sparse=True)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, items: Tensor) -> Tensor:
        """Return vectors [B, D] of items [B, T], in which -1 pads."""
        vectors = self.embedding(items.clamp(min=0)) * (items >= 0).unsqueeze(-1)
        hidden: Tensor = self.gru(vectors)[0][:, -1]
        return hidden


def read_part(path: Path, sessions: int) -> tuple[list[list[int]], int]:
    """Return the items of the first sessions, and the number of distinct items."""
    ids: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    with lzma.open(path, "rt") as file:
        for line in file:
            session, item = line.split()
            if session not in found and len(found) == sessions:
                break
            found.setdefault(session, []).append(ids.setdefault(item, len(ids)))
    return list(found.values()), len(ids)


def pairs_of(sessions: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Return each item but the first of a session, with the items before it."""
    return [(items[max(0, i - PART_ITEMS) : i], items[i]) for items in sessions for i in range(1, len(items))]


def neighbours_of(pairs: Sequence[tuple[list[int], int]], num_items: int) -> Tensor:
    """Return the items [C, 8] that most often follow each item, -1 pads."""
    following = [Counter[int]() for _ in range(num_items)]
    for before, after in pairs:
        following[before[-1]][after] += 1
    rows = [[item for item, _ in counter.most_common(NEIGHBOURS)] for counter in following]
    return torch.tensor([row + [-1] * (NEIGHBOURS - len(row)) for row in rows])


def train_part(
    path: Path, designs: Sequence[str], device: str, seconds: float | None, epochs: int, points: int
) -> Iterator[list[Row]]:
    """Train each design on a part of tmall, and yield the rows of its evaluations.

    Without seconds, the first design runs for the given epochs, and the others as long as it.
    """
    sessions, num_items = read_part(path, PART_SESSIONS)
    held_out = pairs_of(sessions[19::20])
    training = pairs_of([items for i, items in enumerate(sessions) if i % 20 != 19])
    counts = ClassCounts(torch.bincount(torch.tensor([after for _, after in training]), minlength=num_items) + 1.0)
    print(f"{PART}: {num_items:,} classes, {len(training):,} examples, {len(held_out):,} held out", flush=True)
    for design in designs:
        torch.manual_seed(0)
        encoder = LastItems(num_items, PART_DIM)
        including = design.endswith(INCLUDING)
        name, _, k = design.removesuffix(INCLUDING).partition(":")
        sampler = make_sampler(None if name == "default" else name, counts, k=int(k) if k else None)
        encoder = encoder.to(device)
        head = ClassHead.tied(encoder.embedding, counts=counts, sampler=sampler).to(device)
        rows, others = RowAdagrad(head.parameters(), ROW_RATE), torch.optim.Adam(encoder.gru.parameters(), GRU_RATE)
        neighbours = neighbours_of(training, num_items) if including else None
        batches = SessionBatches(training, PART_BATCH, seed=0, neighbours=neighbours)
        valid = list(SessionBatches(held_out, 1024, seed=None))
        # Exact training comes first and decides how long the others train.
        due = {"every": max(1, len(batches) // points)} if seconds is None else {"seconds": seconds / epochs / points}
        history = Training(
            head,
            batches,
            [rows, others],
            encoder=encoder,
            epochs=epochs if seconds is None else None,
            seconds=seconds,
            held_out=HeldOut(valid, **due),
        ).run()
        seconds = history.progress.seconds if seconds is None else seconds
        error = true_error(head, encoder, list(itertools.islice(batches, 8)))
        yield points_of(PART, design, device, history.records, describe(head.sampler), error, len(training))


def train_timed(
    data: str, folder: Path, work: Path, designs: Sequence[str], device: str, seconds: float, points: int
) -> Iterator[list[Row]]:
    """Train each design for the same time as the command does, and yield the rows of its evaluations."""
    known = DATA_SETS[data](folder, work)
    task = tasks.TASKS[known.kind]
    settings = replace(known.settings, epochs=None, seconds=seconds, seed=0).over(task.defaults)
    with tempfile.TemporaryDirectory(dir=work) as spool:
        read = task.read(known.source, settings, Path(spool))
        examples = None
        for design in designs:
            run = work / "frontier-run"
            shutil.rmtree(run, ignore_errors=True)
            given = replace(read, spec=replace(read.spec, settings=design_settings(design, settings)))
            options = tasks.RunOptions(device=device, evaluate_seconds=seconds / points, checkpoint_every=1e9)
            fitted = tasks.train(given, run, options)
            model, history = fitted.model, fitted.history
            batches = list(itertools.islice(read.train, 8))
            error = true_error(model.head, model.encoder, batches)
            if examples is None:
                examples = round(history.progress.examples / max(1, history.progress.step) * len(read.train))
            yield points_of(data, design, device, history.records, describe(model.head.sampler), error, examples)


def points_of(
    data: str, design: str, device: str, records: Sequence[Record], decided: str, error: float, examples: int
) -> list[Row]:
    """Return a row for each evaluation."""
    return [
        {
            "data": data,
            "design": design,
            "device": device_name(device),
            "step": record.step,
            "epochs": round(record.examples / examples, 3),
            "seconds": round(record.seconds, 3),
            "perplexity": round(math.exp(record.held_out_loss or 0.0), 2),
            "decided": decided,
            "true_error": round(error, 4),
            **provenance(),
        }
        for record in records
        if record.held_out_loss is not None
    ]


def best(rows: Sequence[Row]) -> Row:
    """Return the evaluation of the lowest perplexity."""
    return min(rows, key=lambda row: float(row["perplexity"]))


def table(rows: Sequence[Row]) -> str:
    """Return, for each design, its best perplexity and when it first comes to 1.01 times that of exact training."""
    lines = [
        f"{'data':12}{'design':16}{'best':>10}{'after s':>10}{'/ exact':>9}{'1.01 × exact after s':>22}{'/ exact':>9}"
        f"{'error':>8}  decided"
    ]
    keys = dict.fromkeys((row["data"], row["device"]) for row in rows)
    for data, device in keys:
        found = [row for row in rows if (row["data"], row["device"]) == (data, device)]
        exact = best([row for row in found if row["design"] == "exact"] or found)
        bound, whole = TARGET_RATIO * float(exact["perplexity"]), float(exact["seconds"])
        for design in dict.fromkeys(row["design"] for row in found):
            own = [row for row in found if row["design"] == design]
            lowest = best(own)
            first = next((row for row in own if float(row["perplexity"]) <= bound), None)
            reached = "never" if first is None else f"{float(first['seconds']):.1f}"
            share = "–" if first is None else f"{float(first['seconds']) / whole:.2f}"
            lines.append(
                f"{data:12}{design:16}{float(lowest['perplexity']):10.1f}{float(lowest['seconds']):10.1f}"
                f"{float(lowest['perplexity']) / float(exact['perplexity']):9.3f}{reached:>22}{share:>9}"
                f"{float(own[-1]['true_error']):8.3f}  {own[-1]['decided']}"
            )
    return "\n".join(lines)


def draw(axes: "Axes", rows: Sequence[Row], title: str) -> None:
    """Plot the perplexity of each design against the seconds of training."""
    from matplotlib.ticker import LogLocator

    for design in dict.fromkeys(row["design"] for row in rows):
        label, colour, dash = STYLES.get(design, (design, "#999999", "-"))
        own = [(float(row["seconds"]), float(row["perplexity"])) for row in rows if row["design"] == design]
        thick = 2.6 if design in ("exact", "default") else 1.4
        axes.plot(*zip(*own, strict=True), dash, color=colour, marker="o", ms=3, lw=thick, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
        # All numbers would run into each other.
        axis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axis.set_minor_formatter("{x:,g}")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out perplexity")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False)


def plot(path: Path) -> list[Path]:
    """Write a picture for each data set and device beside the CSV file, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from benchmarks.plots import STYLE

    written = []
    rows = read_rows(path)
    for data, device in dict.fromkeys((row["data"], row["device"]) for row in rows):
        found = [row for row in rows if (row["data"], row["device"]) == (data, device)]
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
            draw(axes, found, f"{data}, {device}: perplexity by time and design")
            kind = "gpu" if "NVIDIA" in device else "cpu"
            for ending in ("svg", "png"):
                written.append(path.with_name(f"{path.stem}-{data}-{kind}.{ending}"))
                metadata = {"Date": None} if ending == "svg" else None
                figure.savefig(written[-1], dpi=160, bbox_inches="tight", metadata=metadata)
            pyplot.close(figure)
    return written


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="data sets")
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS), metavar="NAME", help="default, or sampler[:k]")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of training on nowplaying and wikitext-2")
    parser.add_argument("--epochs", type=int, default=PART_EPOCHS, help="epochs of exact training on tmall-part")
    parser.add_argument("--points", type=int, default=10, help="evaluations per training; of tmall-part, per epoch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of the CPU (default: torch's)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "manyclass-frontier")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file; runs that it holds are not repeated")
    parser.add_argument("--table", action="store_true", help="print the table of the CSV file instead")
    parser.add_argument("--plot", action="store_true", help="plot the CSV file instead")
    arguments = parser.parse_args()
    if arguments.plot:
        print(*plot(arguments.out), sep="\n")
        return
    if arguments.table:
        print(table(read_rows(arguments.out)))
        return
    if not arguments.data.is_dir():
        parser.exit(2, f"frontier: {arguments.data} is no folder; set MANYCLASS_DATA or --data\n")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    device = device_name(arguments.device)
    for data in arguments.sets:
        done = {(row["data"], row["design"], row["device"]) for row in read_rows(arguments.out)}
        designs = [design for design in arguments.designs if (data, design, device) not in done]
        if data == PART:
            path = arguments.data / "sessions" / "tmall-train.txt.xz"
            exact = [row for row in read_rows(arguments.out) if (row["data"], row["device"]) == (data, device)]
            seconds = max((float(row["seconds"]) for row in exact if row["design"] == "exact"), default=None)
            runs = train_part(path, designs, arguments.device, seconds, arguments.epochs, arguments.points)
        else:
            places = arguments.data, arguments.work, designs, arguments.device
            runs = train_timed(data, *places, arguments.seconds, arguments.points)
        for rows in runs:
            for row in rows:
                append(arguments.out, row)
            last, lowest = rows[-1], best(rows)
            print(
                f"{data:12}{last['design']:16} best {lowest['perplexity']:10.1f} after {lowest['seconds']:.1f} s, last "
                f"{last['perplexity']:10.1f} after {last['seconds']:.1f} s, {last['step']} steps, "
                f"error {last['true_error']}, {last['decided']}",
                flush=True,
            )
    print(f"\n{table(read_rows(arguments.out))}")


if __name__ == "__main__":
    main()
