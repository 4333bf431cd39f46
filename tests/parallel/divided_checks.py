"""Checks of divided heads that several processes run together; each takes its rank."""

import copy
import pickle
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from manyclass import ClassCounts, ClassHead, HierarchicalHead, ScorerHead, diagnose, optim
from manyclass.objectives import BlackOut
from manyclass.parallel import load_checkpoint, prepare, save_checkpoint, save_weights, shard
from manyclass.samplers import Bernoulli, InBatch, Learned, Systematic, Tailored
from tests.parallel.divided import (
    CASES,
    DTYPES,
    FEW,
    SAMPLERS,
    B,
    C,
    D,
    K,
    automatic,
    batch,
    divided,
    drawn,
    make,
    part,
    steps_of,
    train,
    weights,
)


def trainings(rank):
    """Return losses, gradients of hidden, rows and exact results of all cases."""
    ranks, found = dist.get_world_size(), {}
    for (sampler, objective, optimiser, more), dtype in ((case, dtype) for case in CASES for dtype in DTYPES):
        if dtype == torch.float32 and (sampler, objective) not in FLOAT32:
            continue
        # Without further arguments on one number of processes, with them on all: each exchange takes a while.
        if not more and ranks != WORLD_OF_ALL:
            continue
        head = divided(make(sampler, objective, dtype))
        steps = steps_of(objective, more)
        losses, gradient = train(head, optimiser, steps, more=more, dtype=dtype, rank=rank, ranks=ranks)
        found[sampler, objective, optimiser, more, dtype] = {
            "losses": losses,
            "gradient": gradient,
            "weight": head.weight.detach(),
            "bias": head.bias.detach(),
        }
    return found


WORLD_OF_ALL = 3
FLOAT32 = {("systematic", "likelihood"), ("learned", "likelihood"), ("systematic", "hinge ranking")}


def draws(rank):
    """Return the draws of each sampler for several seeds."""
    found = {}
    for name in SAMPLERS:
        head = divided(make(name))
        found[name] = [drawn(head.sampler, seed, head.shard) for seed in range(30)]
    return found


def few_classes(rank):
    """Return sizes, losses and rows of a head of 5 classes."""
    torch.manual_seed(0)
    head = ClassHead(D, FEW, sampler=Systematic(weights(FEW), 3), dtype=torch.float64)
    head = divided(head)
    hidden, target, _ = batch(0, torch.float64)
    own = part(rank, dist.get_world_size())
    torch.manual_seed(1)
    loss = head(hidden[own], target[own] % FEW)
    loss.backward()
    exact = head.exact_loss(hidden[own], target[own] % FEW)
    best = head.topk(hidden[own], 3)
    return head.shard.size, loss.item(), exact.item(), head.weight.grad, best.ids, best.log_prob


def results(rank):
    """Return everything that a head computes beside its loss."""
    head = divided(make("systematic"))
    hidden, target, more = batch(0, torch.float64)
    own = part(rank, dist.get_world_size())
    hidden, target = hidden[own].clone().requires_grad_(), target[own]
    exclude, weight = more["exclude"][own], more["weight"][own]
    ids = torch.arange(C)[:: 2 + rank]
    exact = head.exact_loss(hidden, target, exclude=exclude, weight=weight)
    exact.backward()
    torch.manual_seed(2 + rank)
    return {
        "exact": exact.item(),
        "gradient": hidden.grad,
        "rows": head.weight.grad,
        "none": head.exact_loss(hidden, target, reduction="none").detach(),
        "sum": head(hidden, target, reduction="sum", generator=torch.Generator().manual_seed(1)).item(),
        "log z": head.log_z(hidden).detach(),
        "scores": head.scores(hidden, ids).detach(),
        "log prob": head.log_prob(hidden, ids.expand(len(hidden), -1)).detach(),
        "top": head.topk(hidden, 4, exclude=exclude),
        "estimate": head.approximate_log_likelihood(hidden, target.clamp(min=0)).detach(),
        "diagnosis": diagnose(head, hidden, target, exclude=exclude, draws=3),
    }


def traffic(rank):
    """Return the bytes of a step, of heads with few and with many classes."""
    found = {}
    for number in (1_000, 200_000):
        head = divided(ClassHead(D, number, sampler=Systematic(torch.ones(number), 64), sparse=True))
        own = part(rank, dist.get_world_size())
        hidden = torch.randn(B, D)[own].requires_grad_()
        head.shard.sent.clear()
        head(hidden, torch.arange(B)[own]).backward()
        found[number] = dict(head.shard.sent)
    return found


class Model(nn.Module):
    """An encoder and a head, whose forward returns the loss."""

    def __init__(self, head):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.head = nn.Linear(D, D, dtype=torch.float64), head

    def forward(self, x, target):
        return self.head(self.encoder(x), target)


def trained_together(model, run, rank, ranks, steps=8):
    tables = list(model.head.parameters(recurse=False))
    optimizers = [optim.RowAdagrad(tables, 0.1, initial_accumulator_value=0.1)]
    optimizers.append(torch.optim.SGD(model.encoder.parameters(), 0.1))
    torch.manual_seed(5 + rank)
    for step in range(steps):
        x, target, _ = batch(step, torch.float64)
        own = part(rank, ranks)
        for optimizer in optimizers:
            optimizer.zero_grad()
        run(x[own], target[own]).backward()
        optim.clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
    encoder = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.encoder.parameters()]
    return [p.detach() for p in encoder], model.head.weight.detach()


def data_parallel(rank):
    model = Model(divided(make("learned")))
    return trained_together(model, DistributedDataParallel(prepare(model)), rank, dist.get_world_size())


def fully_sharded(rank):
    model = Model(divided(make("learned")))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params=set(model.head.parameters()))
    return trained_together(model, model, rank, dist.get_world_size())


def message(call):
    """Return the error of a call as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(rank):
    """Return the messages of wrong set-ups, some of them on one rank alone."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("classes",))

    def tied():
        embedding = nn.Embedding(C, D)
        return ClassHead.tied(embedding, sampler=Systematic(weights(), K))

    found = {
        "dim": message(lambda: shard(make("systematic"), mesh, dim="rows")),
        "number of dim": message(lambda: shard(make("systematic"), mesh, dim=1)),
        "mesh": message(lambda: shard(make("systematic"), ranks)),
        "classes": message(lambda: divided(ClassHead(D, C + rank, sampler=Systematic(weights(C + rank), K)))),
        "counts": message(lambda: divided(ClassHead(D, C, sampler=Systematic(weights() + (rank == 1), K)))),
        "dtype": message(lambda: divided(make("systematic", dtype=torch.float64 if rank else torch.float32))),
        "kind": message(lambda: divided(HierarchicalHead(D, C))),
        "kind on a rank": message(
            lambda: divided(make("systematic") if rank else ScorerHead(None, Learned(weights(), K)))
        ),
        "sampler": message(lambda: divided(ClassHead(D, C, sampler=InBatch(weights())))),
        "bernoulli": message(lambda: divided(ClassHead(D, C, sampler=Bernoulli(weights(), K)))),
        "probes": message(lambda: divided(ClassHead(D, C, sampler=Tailored(weights(), K, probes=2)))),
        "objective": message(lambda: divided(ClassHead(D, C, sampler=Systematic(weights(), K), objective=BlackOut()))),
        "tied": message(lambda: divided(tied())),
        "twice": message(lambda: divided(divided(make("systematic")))),
        "optimiser": message(adam),
        "resize": message(lambda: divided(make("systematic")).resize(C + 1)),
        "unprepared": message(unprepared_data_parallel),
        "another sampler": message(lambda: divided(make("systematic")).use(Systematic(weights(), K))),
        "other samplers": message(lambda: divided(make("systematic" if rank else "learned"))),
        "other k": message(lambda: divided(ClassHead(D, C, sampler=Learned(weights(), K + rank)))),
        "learned z": message(lambda: divided(make("systematic", "noise contrastive, learned"))),
    }
    module = sys.modules["manyclass.parallel.shard"]
    release = module.__version__
    module.__version__ = "0.0.1" if rank == 1 else release
    found["release"] = message(lambda: divided(make("systematic")))
    module.__version__ = release
    head = divided(make("systematic"))
    hidden, target, _ = batch(0, torch.float64)
    found["target"] = message(lambda: head(hidden, target.clamp(min=0) + C * (rank == 1)))
    found["after it"] = message(lambda: head(hidden, target))
    return found


def adam():
    head = divided(make("systematic", sparse=False))
    save_checkpoint("never-written", {"optimizer": torch.optim.Adam(head.parameters())})


def unprepared_data_parallel():
    model = Model(divided(make("systematic")))
    # Rows of all ranks have the same shape, so DDP itself has no objection.
    for name in ("weight", "bias"):
        rows = getattr(model.head, name)
        rows.data = torch.zeros(3, *rows.shape[1:], dtype=rows.dtype)
    DistributedDataParallel(model)(*batch(0, torch.float64)[:2])


def default_head(rank):
    """Return the decisions of the default sampler, and rows."""
    torch.manual_seed(3)
    head = divided(ClassHead(D, C, sampler=automatic(), dtype=torch.float64))
    train(head, "RowAdagrad", 20, more=False, dtype=torch.float64, rank=rank, ranks=dist.get_world_size())
    return head.sampler.decisions, head.sampler.design, head.sampler.k, head.weight.detach()


def probes(rank):
    """Return the state of the probe of heads whose ranks draw unequal numbers of classes, or none."""
    found = []
    for number, k in ((FEW, 3), (2000, 64)):
        torch.manual_seed(0)
        head = divided(ClassHead(D, number, sampler=Systematic(weights(number), k), dtype=torch.float64))
        hidden, target, _ = batch(0, torch.float64, 400)
        own = part(rank, dist.get_world_size(), 400)
        for _ in range(10):
            head(hidden[own], target[own] % number).backward()
        found.append(head.probe.state())
    return found


def normalisers(rank):
    """Return the loss under given log z, and the gradient of these."""
    head = divided(make("systematic", "noise contrastive"))
    hidden, target, _ = batch(0, torch.float64)
    own = part(rank, dist.get_world_size())
    log_z = torch.linspace(0, 1, B, dtype=torch.float64)[own].requires_grad_()
    torch.manual_seed(1)
    loss = head(hidden[own], target[own], log_z=log_z)
    loss.backward()
    return loss.item(), log_z.grad


def momentum(rank):
    """Return rows after steps of an optimiser that moves a row even if its gradient is 0."""
    head = divided(make("importance"))
    optimizer = optim.RowAdam(list(head.parameters(recurse=False)), 0.1)
    return adam_steps(head, optimizer, part(rank, dist.get_world_size()), rank)


def adam_steps(head, optimizer, own, rank):
    torch.manual_seed(5 + rank)
    for step in range(6):
        hidden, target, more = batch(step, torch.float64)
        optimizer.zero_grad()
        head(hidden[own], target[own], include=more["include"][own]).backward()
        optimizer.step()
    return head.weight.detach()


def copies(rank):
    """Return the loss of a head and of its copy, whether the copy is marked, and the error of pickling."""
    head = divided(make("learned"))
    copied = copy.deepcopy(head)
    hidden, target, _ = batch(0, torch.float64)
    own = part(rank, dist.get_world_size())
    losses = []
    for each in (head, copied):
        torch.manual_seed(1)
        losses.append(each(hidden[own], target[own]).item())
    marked = all(table.shard is head.shard for table in copied.parameters(recurse=False))
    return losses, marked, message(lambda: pickle.dumps(head))


def streamed_counts(rank):
    """Return π of a class after its count has grown, on the rank that holds it."""
    counts = ClassCounts.streaming(C)
    head = divided(ClassHead(D, C, counts=counts, sampler=Systematic(counts, K)))
    counts.update(torch.full((1000,), 7))
    head.sampler.refresh()
    target = torch.full((3,), 7)
    return head.sampler(target).target_log_kappa(), head.sampler.comb.certain + head.shard.first


def saved(rank, folder, ranks_before):
    """Load the checkpoint of other ranks if there is one, train on, and save; return state and rows."""
    ranks, found = dist.get_world_size(), {}
    for name, make_optimiser in SAVED.items():
        head = divided(make("learned", seed=3 if ranks_before is None else 4))
        optimizer = make_optimiser(list(head.parameters(recurse=False)))
        parts = {"head": head, "optimizer": optimizer}
        if ranks_before is None:
            for step in range(7):
                hidden, target, _ = batch(step, torch.float64)
                optimizer.zero_grad()
                own = part(rank, ranks)
                head(hidden[own], target[own]).backward()
                optimizer.step()
        else:
            load_checkpoint(folder / f"{name}-{ranks_before}", parts)
        save_checkpoint(folder / f"{name}-{ranks}", parts, wait=ranks != 3).result()
        found[name] = whole(parts)
    torch.manual_seed(3)
    head = divided(ClassHead(D, C, counts=weights(), sampler=automatic(), dtype=torch.float64))
    if ranks_before is not None:
        load_checkpoint(folder / f"default-{ranks_before}", {"head": head})
    save_checkpoint(folder / f"default-{ranks}", {"head": head})
    found["default"] = {name: whole_of(value) for name, value in head.state_dict().items()}
    dist.barrier()
    return found


def weights_saved(rank, folder):
    """Save the weights of a model with a divided head, some of whose ranks have no class; return the encoder's."""
    torch.manual_seed(0)
    head = divided(ClassHead(D, FEW, sampler=Systematic(weights(FEW), 3), dtype=torch.float64))
    model = Model(head)
    save_weights(folder / "model.safetensors", model)
    return {name: whole_of(value) for name, value in model.state_dict().items()}


SAVED = {
    "RowSGD": lambda p: optim.RowSGD(p, 0.1, momentum=0.9),
    "RowAdagrad": lambda p: optim.RowAdagrad(p, 0.1, by_row=True),
    "RowAdam": lambda p: optim.RowAdam(p, 0.1),
}


def whole(parts):
    """Return all tensors of the parts of a training, by name, gathered from all ranks."""
    state = {f"head.{name}": value for name, value in parts["head"].state_dict().items()}
    for number, of_parameter in parts["optimizer"].state_dict()["state"].items():
        state |= {f"{number}.{name}": value for name, value in of_parameter.items() if isinstance(value, torch.Tensor)}
    return {name: whole_of(value) for name, value in state.items()}


def whole_of(value):
    return copy.deepcopy(value.full_tensor() if hasattr(value, "full_tensor") else value)


CHECKS = {
    "trainings": trainings,
    "draws": draws,
    "few classes": few_classes,
    "results": results,
    "traffic": traffic,
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    "refusals": refusals,
    "default head": default_head,
    "streamed counts": streamed_counts,
    "copies": copies,
    "probes": probes,
    "normalisers": normalisers,
    "momentum": momentum,
}
