"""A small model over classes of Zipf's frequencies, its data, and its training on one process or several."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyclass import ClassHead, optim
from manyclass.parallel import prepare

C, D, K = 1000, 8, 64  # the default sampler then rebuilds its table every 50 steps
JOINT_BATCH = 64
OPTIMISERS = {
    "Adam": lambda tables, others: [torch.optim.Adam([*tables, *others], 0.02)],
    "RowAdagrad": lambda tables, others: [optim.RowAdagrad(tables, 0.2), torch.optim.Adam(others, 0.02)],
    "RowAdam": lambda tables, others: [optim.RowAdam(tables, 0.02), torch.optim.Adam(others, 0.02)],
    "RowSGD": lambda tables, others: [optim.RowSGD(tables, 0.5, momentum=0.5), torch.optim.Adam(others, 0.02)],
    "Adagrad": lambda tables, others: [torch.optim.Adagrad([*tables], 0.2), torch.optim.Adam(others, 0.02)],
    "SparseAdam": lambda tables, others: [torch.optim.SparseAdam([*tables], 0.02), torch.optim.Adam(others, 0.02)],
}


class Model(nn.Module):
    """An encoder and a head, whose forward returns the loss."""

    def __init__(self, head, encoder=None):
        super().__init__()
        self.encoder = nn.Linear(D, head.dim) if encoder is None else encoder
        self.head = head

    def forward(self, x, target, *, exact=False, uses_head=True, **options):
        hidden = self.encoder(x)
        if not uses_head:
            return hidden.square().mean()
        return (self.head.exact_loss if exact else self.head)(hidden, target, **options)


def frequencies():
    return 1000 / torch.arange(1, C + 1)


def default_head(**options):
    return ClassHead(D, C, counts=frequencies(), **{"k": K} | options)


@functools.cache
def examples(number, seed):
    """Return inputs [N, D] and targets [N] from one fixed model."""
    generator = torch.Generator().manual_seed(0)
    truth = 2 * torch.randn(C, D, generator=generator)
    generator.manual_seed(1000 + seed)
    x = torch.randn(number, D, generator=generator)
    p = (x @ truth.T / D**0.5 + frequencies().log()).softmax(1)
    return x, torch.multinomial(p, 1, generator=generator).squeeze(1)


def train(model, optimisers, steps, *, seed=0, start=0, batch=JOINT_BATCH, rank=0, world=1):
    """Take training steps, each on this rank's part of a joint batch."""
    for step in range(start, start + steps):
        x, target = examples(batch, seed * 10_000 + step)
        for optimiser in optimisers:
            optimiser.zero_grad()
        model(x[rank::world], target[rank::world]).backward()
        for optimiser in optimisers:
            optimiser.step()


def optimisers_of(model, name):
    tables = list(model.head.parameters(recurse=False))
    return OPTIMISERS[name](tables, model.encoder.parameters())


def on_ranks(model):
    """Wrap a model as a user does: a sparse one is prepared, a dense one is not."""
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return DistributedDataParallel(prepare(model) if sparse else model)


def trained(name, steps, *, seed=0, **options):
    """Return a trained model: on all ranks together if there are several, else on the joint batch."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(100 * seed + rank)
    model = Model(default_head(sparse=name != "Adam", **options))
    run = on_ranks(model) if world > 1 else model
    train(run, optimisers_of(model, name), steps, seed=seed, rank=rank, world=world)
    return model


@torch.no_grad()
def held_out(model):
    x, target = examples(2000, -1)
    return -model(x, target, exact=True).item()
