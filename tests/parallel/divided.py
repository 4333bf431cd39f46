"""Heads whose classes are divided among processes, and trainings of them on parts of a joint batch."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyclass import ClassHead, optim
from manyclass.objectives import Likelihood
from manyclass.parallel import shard
from manyclass.samplers import (
    Automatic,
    Budget,
    Costs,
    Exhaustive,
    Importance,
    Learned,
    Systematic,
    Tailored,
    WithExplicit,
)
from tests.tables import OBJECTIVES

# 53 classes on 4 ranks: 14, 14, 14, 11.
C, D, K, B = 53, 6, 12, 11
# 5 classes on 4 ranks: 2, 2, 1, 0.
FEW = 5


def weights(num_classes=C):
    return 1 / torch.arange(1.0, num_classes + 1)


SAMPLERS = {
    "exhaustive": lambda: Exhaustive(C),
    "systematic": lambda: Systematic(weights(), K),
    "systematic, by groups": lambda: Systematic(weights(), K, group_size=3),
    "systematic, stratified": lambda: Systematic(weights(), K, stratified=True, group_size=5),
    "systematic, uniform": lambda: Systematic(weights(), K, power=0),
    "importance": lambda: Importance(weights(), K),
    "importance, by groups": lambda: Importance(weights(), K, group_size=3),
    "learned": lambda: Learned(weights(), K, every=4),
    "learned, by groups": lambda: Learned(weights(), K, every=4, group_size=4),
    "tailored": lambda: Tailored(weights(), K, every=4),
    "tailored, by groups": lambda: Tailored(weights(), K, group_size=4, rank=3, every=4),
    "budget": lambda: Budget(Systematic(weights(), K), 0.3, every=1),
    "fixed set explicit": lambda: WithExplicit(Systematic(weights(), K), torch.tensor([0, 20, C - 1])),
    "minibatch explicit": lambda: WithExplicit(Learned(weights(), K, every=4), "batch"),
    "tailored and a set": lambda: WithExplicit(Tailored(weights(), K), torch.tensor([3, 30])),
    "set alone": lambda: WithExplicit(None, torch.arange(0, C, 5), num_classes=C),
}
# The objectives of the two forms; BlackOut has neither, and no process has the whole gradient of a learned z.
DIVISIBLE = [name for name in OBJECTIVES if name not in ("blackout", "noise contrastive, learned")]
OPTIMISERS = {
    "RowSGD": lambda p: optim.RowSGD(p, 0.1),
    "RowAdagrad": lambda p: optim.RowAdagrad(p, 0.1, initial_accumulator_value=0.1),
    "RowAdagrad by row": lambda p: optim.RowAdagrad(p, 0.1, initial_accumulator_value=0.1, by_row=True),
}
# Every sampler, every objective and every optimiser, with and without further arguments of the loss.
CASES = {
    **{(name, "likelihood", "RowAdagrad", more): None for name in SAMPLERS for more in (False, True)},
    **{("systematic", name, "RowAdagrad by row", more): None for name in DIVISIBLE for more in (False, True)},
    **{(name, "hinge ranking", "RowSGD", True): None for name in ("learned", "exhaustive", "minibatch explicit")},
}
# κ of targets that are in no draw is not known to a set alone; plain importance may miss them.
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6}


def make(sampler, objective="likelihood", dtype=torch.float64, *, sparse=True, seed=3):
    torch.manual_seed(seed)
    found = OBJECTIVES[objective][0] if objective != "likelihood" else Likelihood()
    return ClassHead(D, C, sampler=SAMPLERS[sampler](), objective=found, sparse=sparse, dtype=dtype)


def batch(step, dtype, size=B):
    """Return hidden vectors, targets of which one is ignored, and further arguments of the loss."""
    generator = torch.Generator().manual_seed(step)
    hidden = torch.randn(size, D, generator=generator, dtype=dtype)
    target = torch.randint(0, C, (size,), generator=generator)
    target[size // 2] = -100
    exclude = torch.randint(-1, C, (size, 3), generator=generator)
    more = {"exclude": exclude, "include": (exclude + 3) % C, "weight": torch.rand(size, generator=generator).to(dtype)}
    return hidden, target, more


def part(rank, ranks, size=B):
    """Return the examples of a rank: none on one of several, the last ones on another."""
    bounds = {1: [0, size], 2: [0, 4, size], 3: [0, 0, 7, size], 4: [0, 3, 3, size - 1, size]}[ranks]
    return slice(bounds[rank], bounds[rank + 1])


def steps_of(objective, more):
    """Return the steps of a case: 20 for each sampler, fewer for the other arguments."""
    return 20 if objective == "likelihood" and not more else 6


def train(head, optimiser, steps, *, more, dtype, rank=0, ranks=1):
    """Return the losses of a training and the last gradient of hidden; ranks have other seeds than the first."""
    optimizer = OPTIMISERS[optimiser](list(head.parameters(recurse=False)))
    torch.manual_seed(5 + rank)
    losses = []
    for step in range(steps):
        hidden, target, options = batch(step, dtype)
        own = part(rank, ranks)
        hidden = hidden[own].clone().requires_grad_()
        optimizer.zero_grad()
        options = {name: value[own] for name, value in options.items()} if more else {}
        loss = head(hidden, target[own], **options)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), hidden.grad


def divided(head, **options):
    """Divide a head among all processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # A rank that waits for one that has failed must not hold up the tests.
    return shard(head, mesh, **{"timeout": timedelta(seconds=60)} | options)


def drawn(sampler, seed, shard_of=None):
    """Return ids, log κ and log κ of the targets of one draw by each group, without empty slots, in order of ids."""
    target = torch.arange(B)
    hidden = torch.randn(B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(seed if shard_of is None else seed + shard_of.rank)
    candidates = sampler.draw(target, target.unsqueeze(1), hidden=hidden, generator=None)
    if shard_of is not None:
        candidates = candidates.part_of(shard_of)
    log_kappa = candidates.log_kappa()
    known = candidates.target_log_kappa
    return candidates.ids(), log_kappa, None if known is None else known()


def automatic():
    return Automatic(weights(), 0.02, least=K, every=1, costs=Costs(10.0, 1.0, 2.0, 0.01))
