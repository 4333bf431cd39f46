"""Checks that two processes run together; each takes its rank and returns what the tests compare."""

import copy
import io
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from manyclass import ClassHead, HierarchicalHead, ScorerHead
from manyclass.encoders import FeatureEncoder
from manyclass.parallel import prepare
from manyclass.samplers import Automatic, Budget, Costs, Exhaustive, Learned, Tailored, WithExplicit, deciding_part
from tests import tables
from tests.parallel.problem import (
    C,
    D,
    K,
    Model,
    default_head,
    examples,
    frequencies,
    held_out,
    on_ranks,
    optimisers_of,
    train,
    trained,
)

STEPS = 80  # the first rebuilt table is used from step 63 on
FEW_STEPS = 10
STEPS_BEFORE_RESUMING = 60  # while the table is being built that is used from step 63 on


def contents(model):
    """Return all of a model's state, and the gradients."""
    state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return state | {f"{name}.grad": p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


def learned(sampler):
    while not isinstance(sampler, Automatic | Learned | Tailored):
        sampler = sampler.sampler
    if isinstance(sampler, Automatic):
        return torch.cat([sampler.shared.estimate, sampler.tailored.moment.flatten()])
    if isinstance(sampler, Tailored):
        return torch.cat([sampler.moment, sampler.directions])
    return sampler.estimate.clone()


def training(name, steps=STEPS, **options):
    def check(rank):
        model = trained(name, steps, **options)
        return contents(model), learned(model.head.sampler), held_out(model)

    return check


def samplers_learn_together(rank):
    found = {}
    for name, sampler in {
        "explicit": WithExplicit(Learned(frequencies(), K, every=5), "batch"),
        "tailored": Tailored(frequencies(), K, rank=2, every=5),
        "budget": Budget(Learned(frequencies(), K, every=5), 0.01, every=1),
        "all": Budget(WithExplicit(Learned(frequencies(), K, every=5), torch.arange(9)), 0.01, every=1),
        "automatic": Automatic(frequencies(), 0.01, least=K, every=1, costs=Costs(1.0, 0.1, 0.2, 1e-5)),
        "automatic, timed": Automatic(frequencies(), 0.01, least=K, every=1),
    }.items():
        model = Model(ClassHead(D, C, sampler=sampler))
        # Ranks that measure the error on other examples, in batches of other sizes, measure other errors.
        train(on_ranks(model), optimisers_of(model, "Adam"), 13, batch=40 + 20 * rank, rank=rank, world=2)
        part = deciding_part(sampler)
        decided = None if part is None else (part.decisions, part.probe.state(), str(getattr(part, "costs", None)))
        found[name] = learned(sampler), sampler.k, decided
    return found


class Scorer(nn.Module):
    """Inner products with a table."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(C, D)

    def forward(self, hidden, ids):
        return hidden @ self.items(ids).transpose(1, 2)


def every_sampler(rank):
    """Return the states of models with each sampler, after a few steps in batches of other sizes on each rank."""
    found = {}
    for name, make in tables.SAMPLERS.items():
        for kind, head_of in {
            "dense": lambda sampler: ClassHead(D, C, sampler=sampler),
            "sparse": lambda sampler: ClassHead(D, C, sampler=sampler, sparse=True),
            "scorer": lambda sampler: ScorerHead(Scorer(), sampler),
        }.items():
            head = head_of(make(frequencies(), 16, None))
            model = Model(head, nn.Linear(D, D))
            ddp = on_ranks(model)
            for number in range(3):
                backward(ddp, *part(rank, number))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad.to_dense()
                        parameter.grad = None
            found[name, kind] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


def backward(ddp, *inputs, **options):
    """Run both passes; DDP must outlive the second."""
    ddp(*inputs, **options).backward()


def exhaustive_model(sparse=True, seed=0, **options):
    torch.manual_seed(seed)
    return Model(ClassHead(D, C, sampler=Exhaustive(C), sparse=sparse, **options))


def part(rank, number=0):
    """Return the examples of a rank in a pass: not as many as those of the other, nor of the other classes."""
    return examples(3 + 4 * rank, 50 + 2 * number + rank)


def gradients(model):
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}


def passes_of(rank, number):
    """Return the numbers of the passes that a rank accumulates before the last one: more on rank 1."""
    return range(number) if rank == 0 else range(number + 1)


def local_gradients(rank, *, seed=0, passes=(0,), exact=False, uses_head=True):
    """Return what one rank contributes, without DDP."""
    model = exhaustive_model(seed=seed)
    for number in passes:
        model(*part(rank, number), exact=exact, uses_head=uses_head).backward()
    return gradients(model)


def unequal_rows(rank):
    # Another seed on each rank: prepare must broadcast the tables of rank 0.
    model = exhaustive_model(seed=rank)
    ddp = on_ranks(model)
    ddp(*part(rank)).backward()
    sparse = [p.grad.is_sparse for p in model.head.parameters(recurse=False)]
    return contents(model), sparse


def accumulation_without_exchange(rank):
    model = exhaustive_model()
    ddp = on_ranks(model)
    with ddp.no_sync():
        for number in passes_of(rank, 1):
            ddp(*part(rank, number)).backward()
    local = gradients(model)
    ddp(*part(rank, 5)).backward()
    return local, gradients(model)


def accumulation_with_exchange(rank):
    model = exhaustive_model()
    ddp = on_ranks(model)
    for number in range(3):
        ddp(*part(rank, number)).backward()
    return gradients(model), model.head.weight.grad._nnz()


def learning_while_accumulating(rank):
    sampler = Budget(Learned(frequencies(), K), 0.05, every=1)
    model = Model(ClassHead(D, C, sampler=sampler, sparse=True))
    ddp = on_ranks(model)
    for number in range(6):
        with ddp.no_sync():
            for more in passes_of(rank, 1):
                ddp(*part(rank, number + more)).backward()
        ddp(*part(rank, number)).backward()
    return learned(sampler), sampler.probe.state()


def missing_gradient(rank):
    model = exhaustive_model()
    backward(on_ranks(model), *part(rank), uses_head=rank == 0)
    return gradients(model)


def dense_and_sparse_gradients(rank):
    model = exhaustive_model()
    backward(on_ranks(model), *part(rank), exact=rank == 0)
    return gradients(model), model.head.weight.grad.is_sparse


def half_precision(rank):
    model = exhaustive_model().to(torch.bfloat16)
    x, target = part(rank)
    backward(on_ranks(model), x.bfloat16(), target)
    return gradients(model)


def compiled(rank):
    model = exhaustive_model()
    with warnings.catch_warnings():
        # torch's compiler imports deprecated parts of torch.
        warnings.simplefilter("ignore")
        model.head = torch.compile(model.head, backend="aot_eager")
        backward(on_ranks(model), *part(rank))
    return gradients(model)


def tied_embedding(rank):
    torch.manual_seed(rank)
    embedding = nn.Embedding(C, D, sparse=True)
    head = ClassHead.tied(embedding, sampler=Exhaustive(C))
    model = Model(head, nn.Sequential(embedding, nn.Linear(D, D)))
    x = torch.arange(3 + rank)
    backward(on_ranks(model), x, x + 5)
    return contents(model), embedding.weight.grad.is_sparse


def other_tables(rank):
    """Return the state of models with a sparse tree, and with a bag of sparse features."""
    tree = Model(HierarchicalHead(D, C, sparse=True))
    backward(DistributedDataParallel(prepare(tree)), *part(rank))
    bag = Model(ClassHead(4, C, sampler=Exhaustive(C)), FeatureEncoder(50, sparse=True, rank=4))
    inputs = {"columns": torch.arange(3) + rank, "starts": torch.arange(3), "values": torch.ones(3)}
    backward(DistributedDataParallel(prepare(bag)), inputs, torch.arange(3))
    return contents(tree), contents(bag), bag.encoder.layers[0].weight.grad.is_sparse


class Around(nn.Module):
    """A module around a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)


def refusals(rank):
    found = {}

    def refuse(name, call):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    bare = DistributedDataParallel(exhaustive_model())
    refuse("head", lambda: bare(*part(rank)))
    tree = DistributedDataParallel(Model(HierarchicalHead(D, C, sparse=True)))
    refuse("tree", lambda: tree(*part(rank)))
    encoder = FeatureEncoder(50, sparse=True, rank=4)
    bag = DistributedDataParallel(Model(ClassHead(4, C, sampler=Exhaustive(C)), encoder))
    inputs = {"columns": torch.arange(3), "starts": torch.arange(3), "values": torch.ones(3)}
    refuse("bag", lambda: bag(inputs, torch.arange(3)))
    around = DistributedDataParallel(Around(prepare(exhaustive_model())))
    refuse("prepared inside", lambda: around(*part(rank)))
    model = prepare(exhaustive_model())
    copied = DistributedDataParallel(copy.deepcopy(model))
    refuse("copy", lambda: copied(*part(rank)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = DistributedDataParallel(torch.load(file, weights_only=False))
    refuse("pickle", lambda: loaded(*part(rank)))
    group = torch.distributed.new_group([rank], use_local_synchronization=True)
    other = DistributedDataParallel(model, process_group=group)
    refuse("group", lambda: other(*part(rank)))
    refuse("only sparse", lambda: prepare(ClassHead(D, C, sparse=True)))
    return found


def prepared_twice(rank):
    model = prepare(exhaustive_model())
    backward(on_ranks(model), *part(rank))
    return gradients(model)


def moving_average(rank):
    model = Model(default_head(sparse=True))
    ddp = on_ranks(model)
    average = AveragedModel(ddp.module)
    train(ddp, optimisers_of(model, "RowAdagrad"), 3, rank=rank, world=2)
    average.update_parameters(ddp.module)
    return average.module(*part(rank), exact=True).item() > 0, average.module.head.weight.detach()


def resumed(sparse):
    """Return the state after an unbroken training, after one that every rank resumes, and one that rank 0 loads."""

    def fresh():
        model = Model(default_head(sparse=sparse))
        return model, optimisers_of(model, "RowAdagrad" if sparse else "Adam")

    def check(rank):
        model, optimisers = fresh()
        ddp = on_ranks(model)
        train(ddp, optimisers, STEPS_BEFORE_RESUMING, rank=rank, world=2)
        saved = copy.deepcopy([ddp.module.state_dict(), *(optimiser.state_dict() for optimiser in optimisers)])
        random = torch.get_rng_state()
        train(ddp, optimisers, FEW_STEPS, start=STEPS_BEFORE_RESUMING, rank=rank, world=2)
        results = [contents(model)]
        for ranks in ((0, 1), (0,)):
            model, optimisers = fresh()
            if rank in ranks:
                model.load_state_dict(saved[0])
            ddp = DistributedDataParallel(prepare(model))
            for optimiser, state in zip(optimisers, saved[1:], strict=True):
                # torch keeps the tensors of a loaded state, and changes them.
                optimiser.load_state_dict(copy.deepcopy(state))
            torch.set_rng_state(random)
            train(ddp, optimisers, FEW_STEPS, start=STEPS_BEFORE_RESUMING, rank=rank, world=2)
            results.append(contents(model))
        return results

    return check


CHECKS = {
    "dense": training("Adam"),
    "sparse": training("RowAdagrad"),
    **{name: training(name, FEW_STEPS) for name in ("RowAdam", "RowSGD", "Adagrad", "SparseAdam")},
    "samplers": samplers_learn_together,
    "every sampler": every_sampler,
    "unequal rows": unequal_rows,
    "no_sync": accumulation_without_exchange,
    "accumulation": accumulation_with_exchange,
    "learning": learning_while_accumulating,
    "missing gradient": missing_gradient,
    "mixed layouts": dense_and_sparse_gradients,
    "half precision": half_precision,
    "compiled": compiled,
    "tied": tied_embedding,
    "other tables": other_tables,
    "refusals": refusals,
    "prepared twice": prepared_twice,
    "moving average": moving_average,
    "resumed dense": resumed(False),
    "resumed sparse": resumed(True),
}
