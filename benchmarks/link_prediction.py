"""How well sampled training predicts the tails of knowledge-graph triples, beside exact training: ComplEx on FB15k-237.

    python benchmarks/link_prediction.py                                     # the whole, into benchmarks/results/
    python benchmarks/link_prediction.py --device cuda --jobs 6              # the same, six trainings at a time
    python benchmarks/link_prediction.py --triples 5000 --epochs 3 --rank 8  # a part of the triples, printed only

The score of a tail is the inner product of its row with the complex product of head and relation; relations have
reciprocals that ask for the head, and rows are shared by heads and tails. All methods have the same first parameters,
batches, Adagrad and N3 regulariser (Lacroix et al. 2018). Learning rates are chosen alike, from one grid, by the
filtered MRR of the validation triples after a short run. Other true tails of a head and relation, as far as training
knows them, are no negatives of a sampled method; exact training runs with them as negatives, as is usual, and without.

Ranks are filtered: other true tails of any split do not count, ties count as their mean. Seconds are those of training
alone; where several trainings share a device they tell little. Stopped, it goes on with --resume.
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
RATES = (0.05, 0.1, 0.2)
CHUNK = 1000  # triples ranked at once

Row = dict[str, object]


@dataclass(frozen=True)
class Setting:
    """One training, by what it follows from: a row of the table of results.

    Args:
        part: "sweep", a short run to choose the rate by, or "run".
        method: "exact" or a sampler.
        k: classes sampled; 0 for exact training.
        others: what other true tails are: "negatives" or "excluded".
        rate, seed, epochs, rank, batch, reg: of the training.
        triples: how many to train on; 0: all.
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
        size = f", k = {self.k}" if self.k else ""
        return f"{self.method}{size}, others {self.others}"


@dataclass(frozen=True)
class Graph:
    """Triples of both directions [N, 3] on a device, and the tails they know."""

    train: Tensor
    valid: Tensor
    test: Tensor
    known_to_training: KnownTails
    known: KnownTails
    num_entities: int
    num_relations: int


@functools.cache
def read(folder: Path, device: str, triples: int) -> Graph:
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


class Model(nn.Module):
    """A ComplEx, and the head that scores its tails.

    Args:
        graph: how many entities and relations there are.
        rank: complex numbers in a row.
        sampler: whose candidates a step scores; None: it scores all entities.
        sparse: whether gradients hold touched rows alone.
    """

    def __init__(self, graph: Graph, rank: int, sampler: Sampler | None, *, sparse: bool = False) -> None:
        super().__init__()
        self.entities = nn.Embedding(graph.num_entities, 2 * rank, sparse=sparse)
        nn.init.normal_(self.entities.weight, std=INITIAL_STD)
        self.encoder = ComplEx(self.entities, graph.num_relations)
        self.head = None if sampler is None else ClassHead.tied(self.entities, sampler=sampler, bias=False)

    def loss(self, triples: Tensor, exclude: Tensor | None, reg: float) -> Tensor:
        """The loss of triples [B, 3] with the tails `exclude` [B, E] taken out, and the regulariser's reg · Σ |·|³."""
        query, target = self.query(triples), triples[:, 2].contiguous()
        if self.head is None:
            loss = F.cross_entropy(without(query @ self.entities.weight.T, target, exclude), target)
        else:
            loss = self.head(query, target, exclude=exclude)
        return loss + reg * self.encoder.cubes(triples[:, :2], target)

    def query(self, triples: Tensor) -> Tensor:
        found: Tensor = self.encoder(triples[:, :2])
        return found


def without(scores: Tensor, target: Tensor, exclude: Tensor | None) -> Tensor:
    """Scores [B, C] with -inf at the classes of exclude [B, E], -1 pads."""
    if exclude is None:
        return scores
    own = target.unsqueeze(1)
    # Pads mark the target, which is then cleared.
    hit = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, torch.where(exclude < 0, own, exclude), True)
    return scores.masked_fill(hit.scatter_(1, own, False), -torch.inf)


def batches(graph: Graph, setting: Setting, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Triples [B, 3] of one epoch and what each of them excludes."""
    order = torch.randperm(len(graph.train), generator=generator, device=graph.train.device)
    shuffled = graph.train[order]
    parts = shuffled.split(setting.batch)
    if setting.others == "negatives":
        yield from ((part, None) for part in parts)
        return
    # How wide each batch's exclusions are, all at once: a device is waited for once in an epoch.
    number = F.pad(graph.known_to_training.number(shuffled), (0, -len(shuffled) % setting.batch))
    widths = number.reshape(-1, setting.batch).amax(1).tolist()
    for part, width in zip(parts, widths, strict=True):
        yield part, graph.known_to_training.others(part, width=width)


def train(graph: Graph, setting: Setting) -> tuple[Model, float]:
    """A trained model, and the seconds that took."""
    device = graph.train.device
    torch.manual_seed(setting.seed)
    sampler, sparse = None, False
    if setting.method != EXACT:
        counts = ClassCounts.from_targets(graph.train[:, 2].cpu(), graph.num_entities)
        sampler = SAMPLERS[setting.method](counts, setting.k)
        # At this size a GPU goes through the whole table in the time of a few launches.
        sparse = device.type == "cpu"
    model = Model(graph, setting.rank, sampler, sparse=sparse).to(device)
    optimizer = RowAdagrad(model.parameters(), setting.rate)
    generator = torch.Generator(device).manual_seed(setting.seed)
    wait(device)
    start = time.perf_counter()
    for _ in range(setting.epochs):
        for triples, exclude in batches(graph, setting, generator):
            optimizer.zero_grad()
            model.loss(triples, exclude, setting.reg).backward()
            optimizer.step()
    wait(device)
    return model, time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def ranks(model: Model, triples: Tensor, known: KnownTails) -> Tensor:
    """The filtered rank [N] of each triple's tail, from 1; that of ties is their mean."""
    found = []
    for part in triples.split(CHUNK):
        own = part[:, 2].contiguous()
        scores = without(model.query(part) @ model.entities.weight.T, own, known.others(part))
        target = scores.gather(1, own.unsqueeze(1))
        # By those below, of which there are none where scores are NaN: a training that failed must not look good.
        below, equal = (scores < target).sum(1), (scores == target).sum(1)
        found.append(scores.shape[1] - below - (equal - 1) / 2)
    return torch.cat(found).double()


def metrics(split: str, rank: Tensor) -> Row:
    hits = {f"{split}_hits{n}": round(float((rank <= n).double().mean()), 5) for n in (1, 3, 10)}
    return {f"{split}_mrr": round(float((1 / rank).mean()), 5), **hits}


@torch.no_grad()
def rows_per_step(model: Model, triples: Tensor) -> int:
    """How many entities one step scores: targets, and the classes that one draw found."""
    if model.head is None:
        return model.entities.num_embeddings
    candidates = model.head.sampler(triples[:, 2].contiguous(), hidden=model.query(triples))
    drawn = [block.ids[block.log_kappa > -torch.inf] for block in candidates.blocks]
    return len(torch.cat([triples[:, 2], *drawn]).unique())


def run(folder: Path, device: str, jobs: int, threads: int, setting: Setting) -> Row:
    """Train, rank, and say all about it, as one of so many jobs at a time."""
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
    """Rows by their settings, kept in a file after each run: who stops this keeps what is done.

    Args:
        path: a CSV file; None: rows are kept in memory alone.
        resume: whether to go on from what the file holds.
    """

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and resume and path.exists():
            with path.open() as file:
                self.rows = list(csv.DictReader(file))

    def of(self, setting: Setting) -> Row | None:
        wanted = {name: str(value) for name, value in asdict(setting).items()}
        for row in self.rows:
            if all(str(row[name]) == value for name, value in wanted.items()):
                return row
        return None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            write_csv(self.path, self.rows)


def run_all(
    settings: list[Setting], results: Results, pool: ProcessPoolExecutor | None, job: Callable[[Setting], Row]
) -> None:
    """Run what is not among the results yet, in the pool's processes or, without one, here."""
    left = [setting for setting in settings if results.of(setting) is None]
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


def best_rate(results: Results, setting: Setting, rates: list[float]) -> float:
    found = {rate: results.of(replace(setting, rate=rate)) for rate in rates}
    return max(rates, key=lambda rate: float(str(found[rate]["valid_mrr"])))


def table(results: Results, runs: dict[str, list[Setting]]) -> str:
    """Means over seeds, and the standard deviation of the MRR."""
    lines = [
        f"{'test, mean over seeds':40}{'rate':>6}{'rows':>8}{'MRR':>8}{'±':>8}{'hits@1':>8}{'@3':>8}{'@10':>8}"
        f"{'valid MRR':>11}{'seconds':>9}"
    ]
    for name, settings in runs.items():
        rows = [results.of(setting) for setting in settings]

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
    """Method, k and what other true tails are, each once."""
    for method in methods:
        if method == EXACT:
            yield from ((EXACT, 0, each) for each in ("negatives", "excluded"))
        else:
            yield from ((method, k, each) for each in others for k in ks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "fb15k-237", help="folder of train, valid and test")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, each in a process of its own")
    methods = [EXACT, *SAMPLERS]
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods, metavar="NAME", help=f"of {methods}")
    parser.add_argument("--k", type=int, nargs="+", default=[145, 1024], help="classes to sample")
    parser.add_argument(
        "--others",
        nargs="+",
        default=["excluded"],
        choices=("negatives", "excluded"),
        help="what other true tails are in sampled training",
    )
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="the grid of learning rates")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--sweep-epochs", type=int, default=5, help="epochs of the runs that choose the rate")
    parser.add_argument("--rank", type=int, default=100, help="complex numbers in a row")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--reg", type=float, default=0.05, help="weight of the N3 regulariser")
    parser.add_argument("--triples", type=int, default=0, help="how many to train on, a tenth to rank (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="CSV file (default: the kept one, for all triples)")
    parser.add_argument("--resume", action="store_true", help="leave out runs that the CSV file holds")
    arguments = parser.parse_args()
    if not list(arguments.data.glob("train.*")):
        parser.exit(2, f"link_prediction: {arguments.data} holds no train.txt; MANYCLASS_DATA or --data says where\n")

    path = arguments.out or (None if arguments.triples else RESULTS)
    results = Results(path, resume=arguments.resume)
    common = {name: getattr(arguments, name) for name in ("rank", "batch", "reg", "triples")}
    sweeps = [
        Setting("sweep", *contender, arguments.rates[0], 0, arguments.sweep_epochs, **common)
        for contender in contenders(arguments.methods, arguments.k, arguments.others)
    ]
    # Processes share the cores; those that wait for a GPU want one each.
    threads = 1 if arguments.device.startswith("cuda") else max(1, torch.get_num_threads() // arguments.jobs)
    job = functools.partial(run, arguments.data, arguments.device, arguments.jobs, threads)
    # A process that is forked cannot use the GPU.
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
