"""Time of a draw made for its batch, by a scan of all classes and by probing cells, and the error of log Z̃ beside it.

    python benchmarks/tailored.py                                  # planted vectors of 10⁴ to 10⁷ classes
    python benchmarks/tailored.py --sizes 1e4 1e5 --repeats 5      # a part of it
    python benchmarks/tailored.py --device cuda --train vectors.pt # trains for 20 s, and saves the vectors
    python benchmarks/tailored.py --vectors vectors.pt             # trained vectors of 10⁴ to 10⁷ classes

A draw for 512 examples and k = 1024 takes turns with the three matrix products of the step that it serves
(512 × 1024 × 64). The error is that of log Z̃ over 20 draws. Beyond 4 million classes, on a GPU beyond 16 million,
nothing is scanned.

Planted class vectors lie around C/50 centres, themselves around 64, and each example is near a class: of 10⁵ classes,
the 16 most probable have two thirds of its probability. Trained vectors are those of nowplaying, in 64 dimensions, as
`manyclass fit --seconds 20` gives them, and the examples are from the training set. Fewer classes are the most frequent
ones, and more are grown from them (`grown.py`).
"""

import argparse
import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from manyclass import tasks
from manyclass.samplers import Systematic, Tailored
from manyclass.training import Batch

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))

from benchmarks.counts import DATA, zipf_counts  # noqa: E402
from benchmarks.grown import grown_vectors  # noqa: E402
from benchmarks.machine import alternate, provenance, quantiles, write_csv  # noqa: E402
from benchmarks.real_data import DATA_SETS  # noqa: E402

BATCH_SIZE, K, DIM = 512, 1024, 64
ERROR_DRAWS = 20
MAX_SCANNED = {"cpu": 1 << 22, "cuda": 1 << 24}
SIZES = ["1e4", "1e5", "1e6", "1e7"]
TRAINED_ON, TRAINED_SECONDS = "nowplaying", 20.0
DESIGNS = {
    "systematic": lambda counts: Systematic(counts, K),
    "scan": lambda counts: Tailored(counts, K, probes=0),
    "probes": lambda counts: Tailored(counts, K, probes=32),
}


def planted(num_classes: int, device: str) -> dict[str, Tensor]:
    """Return class vectors in clusters of clusters, and examples that are each near a class."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(64, DIM, generator=generator)
    fine = coarse[torch.randint(64, (max(1, num_classes // 50),), generator=generator)]
    fine = fine + 0.7 * torch.randn(fine.shape, generator=generator)
    weight = fine[torch.randint(len(fine), (num_classes,), generator=generator)]
    weight = weight.add_(torch.randn(num_classes, DIM, generator=generator), alpha=0.5).mul_(0.3)
    near = torch.randint(num_classes, (BATCH_SIZE,), generator=generator)
    hidden = weight[near] * 2.4 + 0.6 * torch.randn(BATCH_SIZE, DIM, generator=generator)
    counts, _ = zipf_counts(num_classes)
    bias = torch.zeros(num_classes)
    target = torch.randint(num_classes, (BATCH_SIZE,), generator=generator)
    found = {"w": weight, "b": bias, "h": hidden, "t": target, "counts": counts.double()}
    return {name: value.to(device) for name, value in found.items()}


def train(data: Path, device: str, seconds: float) -> dict[str, Tensor]:
    """Return the class vectors of a trained session model, by frequency, and examples of its training set."""
    with tempfile.TemporaryDirectory() as folder:
        known = DATA_SETS[TRAINED_ON](data, Path(folder))
        task = tasks.TASKS[known.kind]
        settings = replace(known.settings, epochs=None, seconds=seconds, dim=DIM).over(task.defaults)
        spool, run = Path(folder) / "spool", Path(folder) / "run"
        spool.mkdir()
        read = task.read(known.source, settings, spool)
        options = tasks.RunOptions(device=device, checkpoint_every=1e9)
        model = tasks.train(read, run, options).model.eval()
        head = model.head
        hidden, target = [], []
        with torch.no_grad():
            for item in itertools.islice(read.train, 8):
                batch = Batch.of(item, model.device)
                present = batch.target >= 0
                hidden.append(model.encoder(batch.inputs)[present])
                target.append(batch.target[present])
    order = torch.as_tensor(read.spec.counts).argsort(descending=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    bias = torch.zeros(len(order)) if head.bias is None else head.bias.detach().cpu()
    return {
        # Half precision: files are smaller, and the error of a design does not depend on it.
        "w": head.weight.detach().cpu()[order].half(),
        "b": bias[order],
        "h": torch.cat(hidden)[:BATCH_SIZE].cpu().half(),
        "t": place[torch.cat(target)[:BATCH_SIZE].cpu()],
        "counts": torch.as_tensor(read.spec.counts)[order],
    }


def trained(path: Path, num_classes: int | None, device: str) -> dict[str, Tensor]:
    """Return trained vectors: all of them, the first, or more classes that are grown from them."""
    base = torch.load(path, weights_only=True)
    num_classes = num_classes or len(base["w"])
    weight, bias = grown_vectors(base["w"].float(), base["b"], num_classes)
    own = torch.arange(num_classes) % len(base["w"])
    # A class of a family is as frequent as the others.
    counts = (base["counts"].double()[own] + 1) / max(1.0, num_classes / len(base["w"]))
    found = {"w": weight, "b": bias, "h": base["h"].float(), "t": base["t"] % num_classes, "counts": counts}
    return {name: value.to(device) for name, value in found.items()}


def error(sampler: Tailored | Systematic, model: dict[str, Tensor], log_z: Tensor) -> float:
    """Return the root-mean-square error of log Z̃."""
    weight, bias, hidden, target = (model[name] for name in ("w", "b", "h", "t"))
    generator = torch.Generator(hidden.device).manual_seed(1)
    own = ((weight[target] * hidden).sum(1) + bias[target]).double()
    total = 0.0
    for _ in range(ERROR_DRAWS):
        drawn = sampler(target, hidden=hidden, exclude=target.unsqueeze(1), generator=generator)
        (block,) = drawn.blocks
        scores = (hidden @ weight[block.ids[0]].T + bias[block.ids[0]]).double() + block.log_kappa
        scores = scores.masked_fill(drawn.empty(), -torch.inf)
        estimate = torch.cat([scores, own.unsqueeze(1)], 1).logsumexp(1)
        total += float((estimate - log_z).square().mean())
    return (total / ERROR_DRAWS) ** 0.5


def exact_log_z(model: dict[str, Tensor]) -> Tensor:
    """Return log Z of the examples, in parts that fit into memory."""
    parts = zip(model["w"].split(1 << 16), model["b"].split(1 << 16), strict=True)
    return torch.stack([(model["h"] @ w.T + b).double().logsumexp(1) for w, b in parts]).logsumexp(0)


def measure(model: dict[str, Tensor], repeats: int, vectors: str) -> list[dict[str, object]]:
    """Return a row for each design."""
    hidden, target, log_z = model["h"], model["t"], exact_log_z(model)
    device = hidden.device
    rows, slots = torch.randn(K, hidden.shape[1], device=device), torch.randn(len(hidden), K, device=device)

    def products() -> None:
        hidden @ rows.T
        slots @ rows
        slots.T @ hidden
        synchronise()

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def draw(sampler: Tailored | Systematic) -> None:
        sampler(target, hidden=hidden)
        synchronise()

    samplers, setup = {}, {}
    for name, build in DESIGNS.items():
        if name == "scan" and len(model["w"]) > MAX_SCANNED[device.type]:
            continue
        start = time.perf_counter()
        sampler = build(model["counts"].cpu()).to(device)
        sampler.attach(model["w"], model["b"])
        if isinstance(sampler, Tailored):
            sampler.moment = hidden.T @ hidden
            sampler.refresh()
        synchronise()
        samplers[name], setup[name] = sampler, time.perf_counter() - start
    contenders = {name: lambda s=sampler: draw(s) for name, sampler in samplers.items()}
    times = alternate({"products": products, **contenders}, repeats)
    floor = quantiles(times["products"])[1]
    found = []
    for name, sampler in samplers.items():
        low, median, high = quantiles(times[name])
        found.append(
            {
                "design": name,
                "num_classes": len(model["w"]),
                "vectors": vectors,
                "draw_ms_p20": round(low * 1e3, 2),
                "draw_ms": round(median * 1e3, 2),
                "draw_ms_p80": round(high * 1e3, 2),
                "over_products": round(median / floor, 2),
                "rmse_log_z": round(error(sampler, model, log_z), 4),
                "setup_s": round(setup[name], 2),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                **provenance(),
            }
        )
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="numbers of classes; 0: those of the trained vectors")
    parser.add_argument("--vectors", type=Path, help="file of trained vectors (default: planted ones)")
    parser.add_argument("--train", type=Path, metavar="FILE", help="train vectors and save them, instead of measuring")
    parser.add_argument("--seconds", type=float, default=TRAINED_SECONDS, help="seconds of that training")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets, for --train")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    if arguments.train is not None:
        torch.save(train(arguments.data, arguments.device, arguments.seconds), arguments.train)
        return
    rows: list[dict[str, object]] = []
    print(f"{'vectors':16}{'classes':>10}  {'design':12}{'draw ms':>10}{'products':>10}{'error':>9}{'set-up s':>10}")
    with torch.no_grad():
        for size in map(int, map(float, arguments.sizes)):
            if arguments.vectors is None:
                model, name = planted(size, arguments.device), "planted"
            else:
                model, name = trained(arguments.vectors, size, arguments.device), "trained"
            for row in measure(model, arguments.repeats, name):
                rows.append(row)
                print(
                    f"{name:16}{row['num_classes']:>10}  {row['design']:12}{row['draw_ms']:>10}"
                    f"{row['over_products']:>10}{row['rmse_log_z']:>9}{row['setup_s']:>10}",
                    flush=True,
                )
    if arguments.out is not None:
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
