"""Sampled against exact training for knowledge-graph completion: ComplEx on FB15k-237.

    python benchmarks/link_prediction.py                                     # the whole, into benchmarks/results/
    python benchmarks/link_prediction.py --device cuda --jobs 6              # the same, six trainings at a time
    python benchmarks/link_prediction.py --triples 5000 --epochs 3 --rank 8  # a part of the triples, printed only

The score of a tail is the inner product of its row with the complex product of head and relation; reciprocal relations
predict the head, and heads and tails share rows. All methods have the same initial parameters, batches, Adagrad and N3
regulariser (Lacroix et al. 2018). All choose the learning rate from the same grid, by the filtered MRR of the
validation triples after a short run. Sampled methods exclude the other true tails of a head and relation in the
training triples from the negatives; exact training runs with them as negatives, as is usual, and without.

Ranks are filtered: other true tails of any split do not count, and ties get their mean rank. Seconds exclude
evaluation; if several trainings share a device they say little. An interrupted run continues with --resume.
"""

import argparse
import csv
import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import ClassCounts, ClassHead
from manyclass.data.triples import KnownTails, read_triples
from manyclass.encoders import ComplEx
from manyclass.encoders.complex import INITIAL_STD
from manyclass.optim import RowAdagrad
from manyclass.samplers import Bernoulli, Clustered, Importance, Learned, Sampler, Systematic

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA  # noqa: E402
from benchmarks.machine import processor, provenance, write_csv  # noqa: E402

RESULTS = ROOT / "results" / "link_prediction.csv"
EXACT = "exact"
SAMPLERS: dict[str, Callable[[ClassCounts, int], Sampler]] = {
    "importance": Importance,
    "bernoulli": Bernoulli,
    "systematic": Systematic,
    "learned": Learned,
    "clustered": Clustered,
}
LEARNING_RATES = (0.05, 0.1, 0.2)
RANKED_AT_ONCE = 1000  # triples

Row = dict[str, object]


@dataclass(frozen=True)
class RunSettings:
    """Settings of one training, the key of a row of results.

    Args:
        part: "sweep", a short run to choose the learning rate, or "run".
        method: "exact" or a key of SAMPLERS.
        k: classes sampled; 0 for exact training.
        others: use of other true tails, "negatives" or "excluded".
        rate, seed, epochs, rank, batch, reg: values of the command-line options.
        triples: number of training triples; 0 means all.
    """

    part: str
    method: str
    k: int
    others: str
    rate: float
    seed: int
    epochs: int
    rank: int
    batch: int
    reg: float
    triples: int

    @property
    def name(self) -> str:
        """Label of the row in the table."""
        size = f", k = {self.k}" if self.k else ""
        return f"{self.method}{size}, others {self.others}"


@dataclass(frozen=True)
class Graph:
    """Triples [N, 3] in both directions on a device, and their known tails."""

    train: Tensor
    valid: Tensor
    test: Tensor
    known_to_training: KnownTails
    known: KnownTails
    num_entities: int
    num_relations: int


@functools.cache
def read(folder: Path, device: str, triples: int) -> Graph:
    """Read the triples, or the first `triples` of them."""
    data = read_triples(folder)
    if triples:
        few = max(1, triples // 10)
        data = replace(data, train=data.train[:triples], valid=data.valid[:few], test=data.test[:few])
    return Graph(
        *(data.both_ways(part).to(device) for part in (data.train, data.valid, data.test)),
        data.known("train").to(device),
        data.known("train", "valid", "test").to(device),
        data.num_entities,
        2 * data.num_relations,
    )


class LinkModel(nn.Module):
    """ComplEx encoder and the head that scores tails.

    Args:
        graph: source of the numbers of entities and relations.
        rank: complex numbers in a row.
        sampler: sampler of the head; None means a step scores all entities.
        sparse: True for sparse gradients of the entities.
    """

    def __init__(self, graph: Graph, rank: int, sampler: Sampler | None, *, sparse: bool = False) -> None:
        super().__init__()
        self.entities = nn.Embedding(graph.num_entities, 2 * rank, sparse=sparse)
        nn.init.normal_(self.entities.weight, std=INITIAL_STD)
        self.encoder = ComplEx(self.entities, graph.num_relations)
        self.head = None if sampler is None else ClassHead.tied(self.entities, sampler=sampler, bias=False)

    def loss(self, triples: Tensor, exclude: Tensor | None, reg: float) -> Tensor:
        """Return the loss of triples [B, 3] without the tails `exclude` [B, E], plus the regulariser reg · Σ |·|³."""
        query, target = self.query(triples), triples[:, 2].contiguous()
        if self.head is None:
            loss = F.cross_entropy(mask_excluded(query @ self.entities.weight.T, target, exclude), target)
        else:
            loss = self.head(query, target, exclude=exclude)
        return loss + reg * self.encoder.cubes(triples[:, :2], target)

    def query(self, triples: Tensor) -> Tensor:
        """Encode heads and relations of triples [B, 3]."""
        found: Tensor = self.encoder(triples[:, :2])
        return found


def mask_excluded(scores: Tensor, target: Tensor, exclude: Tensor | None) -> Tensor:
    """Return scores [B, C] with -inf at the classes of exclude [B, E], where -1 pads."""
    if exclude is None:
        return scores
    own = target.unsqueeze(1)
    # Map pads to the target, whose mark is cleared afterwards.
    hit = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, torch.where(exclude < 0, own, exclude), True)
    return scores.masked_fill(hit.scatter_(1, own, False), -torch.inf)


def batches(graph: Graph, setting: RunSettings, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield batches of triples [B, 3] of one epoch with their excluded tails."""
    order = torch.randperm(len(graph.train), generator=generator, device=graph.train.device)
    shuffled = graph.train[order]
    parts = shuffled.split(setting.batch)
    if setting.others == "negatives":
        yield from ((part, None) for part in parts)
        return
    # Compute the widths of all batches' exclusions together, which synchronises with the device once per epoch.
    number = F.pad(graph.known_to_training.number(shuffled), (0, -len(shuffled) % setting.batch))
    widths = number.reshape(-1, setting.batch).amax(1).tolist()
    for part, width in zip(parts, widths, strict=True):
        yield part, graph.known_to_training.others(part, width=width)


def train(graph: Graph, setting: RunSettings) -> tuple[LinkModel, float]:
    """Return a trained model and the seconds of training."""
    device = graph.train.device
    torch.manual_seed(setting.seed)
    sampler, sparse = None, False
    if setting.method != EXACT:
        counts = ClassCounts.from_targets(graph.train[:, 2].cpu(), graph.num_entities)
        sampler = SAMPLERS[setting.method](counts, setting.k)
        # At this size a GPU updates the whole table in the time of a few kernel launches.
        sparse = device.type == "cpu"
    model = LinkModel(graph, setting.rank, sampler, sparse=sparse).to(device)
    optimizer = RowAdagrad(model.parameters(), setting.rate)
    generator = torch.Generator(device).manual_seed(setting.seed)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(setting.epochs):
        for triples, exclude in batches(graph, setting, generator):
            optimizer.zero_grad()
            model.loss(triples, exclude, setting.reg).backward()
            optimizer.step()
    synchronize(device)
    return model, time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if the device is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def ranks(model: LinkModel, triples: Tensor, known: KnownTails) -> Tensor:
    """Return the filtered rank [N] of each triple's tail, from 1; ties get their mean rank."""
    found = []
    for part in triples.split(RANKED_AT_ONCE):
        own = part[:, 2].contiguous()
        scores = mask_excluded(model.query(part) @ model.entities.weight.T, own, known.others(part))
        target = scores.gather(1, own.unsqueeze(1))
        # Count the scores below: with NaN there are none, so a failed training gets the worst rank.
        below, equal = (scores < target).sum(1), (scores == target).sum(1)
        found.append(scores.shape[1] - below - (equal - 1) / 2)
    return torch.cat(found).double()


def metrics(split: str, rank: Tensor) -> Row:
    """Return MRR and hits at 1, 3 and 10."""
    hits = {f"{split}_hits{n}": round(float((rank <= n).double().mean()), 5) for n in (1, 3, 10)}
    return {f"{split}_mrr": round(float((1 / rank).mean()), 5), **hits}


@torch.no_grad()
def rows_per_step(model: LinkModel, triples: Tensor) -> int:
    """Return the number of distinct entities that one step scores: targets and drawn classes."""
    if model.head is None:
        return model.entities.num_embeddings
    candidates = model.head.sampler(triples[:, 2].contiguous(), hidden=model.query(triples))
    drawn = [block.ids[block.log_kappa > -torch.inf] for block in candidates.blocks]
    return len(torch.cat([triples[:, 2], *drawn]).unique())


def run(folder: Path, device: str, jobs: int, threads: int, setting: RunSettings) -> Row:
    """Train, rank and return a row of results."""
    torch.set_num_threads(threads)
    graph = read(folder, device, setting.triples)
    model, seconds = train(graph, setting)
    return {
        **asdict(setting),
        "rows_per_step": rows_per_step(model, graph.train[: setting.batch]),
        "seconds": round(seconds, 2),
        "jobs": jobs,
        **metrics("valid", ranks(model, graph.valid, graph.known)),
        **metrics("test", ranks(model, graph.test, graph.known)),
        "device": torch.cuda.get_device_name() if graph.train.is_cuda else processor(),
        **provenance(),
    }


class Results:
    """Rows of results, written to a file after each run.

    Args:
        path: a CSV file; None keeps rows in memory only.
        resume: True to start with the rows of the file.
    """

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and resume and path.exists():
            with path.open() as file:
                self.rows = list(csv.DictReader(file))

    def find(self, setting: RunSettings) -> Row | None:
        """Return the row of these settings, or None."""
        wanted = {name: str(value) for name, value in asdict(setting).items()}
        for row in self.rows:
            if all(str(row[name]) == value for name, value in wanted.items()):
                return row
        return None

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        if self.path is not None:
            write_csv(self.path, self.rows)


def run_all(
    settings: list[RunSettings], results: Results, pool: ProcessPoolExecutor | None, job: Callable[[RunSettings], Row]
) -> None:
    """Run the settings without results, in the pool's processes, or in this one without a pool."""
    left = [setting for setting in settings if results.find(setting) is None]
    if pool is None:
        done: Iterator[Row] = map(job, left)
    else:
        done = (future.result() for future in as_completed([pool.submit(job, setting) for setting in left]))
    for i, row in enumerate(done, 1):
        results.add(row)
        name = f"{row['method']} {row['k'] or ''} {row['others']}"
        print(
            f"{row['part']} {i}/{len(left)}: {name:36} rate {row['rate']:<6} seed {row['seed']}  "
            f"valid MRR {row['valid_mrr']:.4f}, test {row['test_mrr']:.4f} {row['seconds']:9.1f} s",
            flush=True,
        )


def best_rate(results: Results, setting: RunSettings, rates: list[float]) -> float:
    """Return the learning rate with the highest validation MRR."""
    found = {rate: results.find(replace(setting, rate=rate)) for rate in rates}
    return max(rates, key=lambda rate: float(str(found[rate]["valid_mrr"])))


def table(results: Results, runs: dict[str, list[RunSettings]]) -> str:
    """Return a table of means over seeds and the standard deviation of the MRR."""
    lines = [
        f"{'test, mean over seeds':40}{'rate':>6}{'rows':>8}{'MRR':>8}{'±':>8}{'hits@1':>8}{'@3':>8}{'@10':>8}"
        f"{'valid MRR':>11}{'seconds':>9}"
    ]
    for name, settings in runs.items():
        rows = [results.find(setting) for setting in settings]

        def mean(column: str, rows: list[Row | None] = rows) -> float:
            return statistics.mean(float(str(row[column])) for row in rows if row is not None)

        spread = statistics.stdev(float(str(row["test_mrr"])) for row in rows) if len(rows) > 1 else 0.0
        lines.append(
            f"{name:40}{settings[0].rate:>6g}{mean('rows_per_step'):>8.0f}{mean('test_mrr'):>8.4f}{spread:>8.4f}"
            f"{mean('test_hits1'):>8.4f}{mean('test_hits3'):>8.4f}{mean('test_hits10'):>8.4f}"
            f"{mean('valid_mrr'):>11.4f}{mean('seconds'):>9.1f}"
        )
    return "\n".join(lines)


def contenders(methods: list[str], ks: list[int], others: list[str]) -> Iterator[tuple[str, int, str]]:
    """Yield method, k and use of other true tails of each contender."""
    for method in methods:
        if method == EXACT:
            yield from ((EXACT, 0, each) for each in ("negatives", "excluded"))
        else:
            yield from ((method, k, each) for each in others for k in ks)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=DATA / "fb15k-237", help="folder of the triples: train, valid and test"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="trainings in parallel, each in a separate process")
    methods = [EXACT, *SAMPLERS]
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods, metavar="NAME", help=f"of {methods}")
    parser.add_argument("--k", type=int, nargs="+", default=[145, 1024], help="classes to sample")
    parser.add_argument(
        "--others",
        nargs="+",
        default=["excluded"],
        choices=("negatives", "excluded"),
        help="use of other true tails in sampled training",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(LEARNING_RATES), help="learning rates to choose from"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--sweep-epochs", type=int, default=5, help="epochs of the runs that choose the learning rate")
    parser.add_argument("--rank", type=int, default=100, help="complex numbers in a row")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--reg", type=float, default=0.05, help="weight of the N3 regulariser")
    parser.add_argument(
        "--triples", type=int, default=0, help="training triples; a tenth as many to rank (default: all)"
    )
    parser.add_argument("--out", type=Path, help="CSV file (default: results/link_prediction.csv, for all triples)")
    parser.add_argument("--resume", action="store_true", help="skip runs that are in the CSV file")
    arguments = parser.parse_args()
    if not list(arguments.data.glob("train.*")):
        parser.exit(2, f"link_prediction: {arguments.data} holds no train.txt; set MANYCLASS_DATA or --data\n")

    path = arguments.out or (None if arguments.triples else RESULTS)
    results = Results(path, resume=arguments.resume)
    common = {name: getattr(arguments, name) for name in ("rank", "batch", "reg", "triples")}
    sweeps = [
        RunSettings("sweep", *contender, arguments.rates[0], 0, arguments.sweep_epochs, **common)
        for contender in contenders(arguments.methods, arguments.k, arguments.others)
    ]
    # Processes share the cores; a training on a GPU needs only one.
    threads = 1 if arguments.device.startswith("cuda") else max(1, torch.get_num_threads() // arguments.jobs)
    job = functools.partial(run, arguments.data, arguments.device, arguments.jobs, threads)
    # A forked process cannot use the GPU.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(arguments.jobs, mp_context=spawn) if arguments.jobs > 1 else None
    try:
        if len(arguments.rates) > 1:
            run_all([replace(sweep, rate=rate) for sweep in sweeps for rate in arguments.rates], results, pool, job)
        runs = {}
        for sweep in sweeps:
            rate = best_rate(results, sweep, arguments.rates) if len(arguments.rates) > 1 else arguments.rates[0]
            best = replace(sweep, part="run", rate=rate, epochs=arguments.epochs)
            runs[sweep.name] = [replace(best, seed=seed) for seed in range(arguments.seeds)]
        run_all([setting for settings in runs.values() for setting in settings], results, pool, job)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    print(f"\n{table(results, runs)}")
    if path is not None:
        print(f"written to {path}")


if __name__ == "__main__":
    main()
