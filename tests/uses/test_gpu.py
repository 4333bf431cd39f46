"""Uses that differ on a GPU: hundreds of steps under autocast, compiled steps, one process of DDP, shards, moves."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from manyclass import ClassHead, parallel
from manyclass.optim import RowAdagrad
from manyclass.samplers import Budget, Clustered, Learned, Systematic, Tailored, WithExplicit
from tests import tables

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's compiler and its shards use deprecated functions; torch 2.11 warns about every sparse gradient.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:TensorFloat32:UserWarning",
        "ignore:Sparse invariant checks:UserWarning",
    ),
]

C, D, B, K, EVERY = 2000, 16, 64, 100, 40
WEIGHTS = 1 / torch.arange(1, C + 1, dtype=torch.float64)
SAMPLERS = {
    **{name: lambda make=make: make(WEIGHTS, K, None) for name, make in tables.SAMPLERS.items()},
    "learned, rebuilt": lambda: Learned(WEIGHTS, K, every=EVERY, order="cluster"),
    "clustered, rebuilt": lambda: Clustered(WEIGHTS, K, group_size=16, every=EVERY),
    "tailored, rebuilt": lambda: Tailored(WEIGHTS, K, group_size=16, rank=8, every=EVERY),
    "tailored, probing cells": lambda: Tailored(WEIGHTS, K, group_size=16, probes=3, every=EVERY),
    "budget, rebuilt": lambda: Budget(Learned(WEIGHTS, K, every=EVERY), 0.1, every=20),
    "explicit, rebuilt": lambda: WithExplicit(Learned(WEIGHTS, K, every=EVERY, order="cluster"), "batch"),
    "systematic from equal weights": lambda: Systematic(torch.ones(C), K, order="cluster"),
}


def head_of(name, **options):
    torch.manual_seed(0)
    return ClassHead(D, C, sampler=SAMPLERS[name](), **options).cuda()


def batch(step):
    """Return examples that are near the vector of their class, in a fixed space."""
    generator = torch.Generator().manual_seed(step)
    target = torch.multinomial(WEIGHTS.float(), B, replacement=True, generator=generator)
    classes = torch.randn(C, D, generator=torch.Generator().manual_seed(10**6))
    return (classes[target] + 0.5 * torch.randn(B, D, generator=generator)).cuda(), target.cuda()


def train(head, steps, *, run=None, optimizer=None, half=None):
    run = head if run is None else run
    optimizer = torch.optim.Adagrad(head.parameters(), 0.2) if optimizer is None else optimizer
    for step in steps:
        optimizer.zero_grad()
        hidden, target = batch(step)
        with torch.autocast("cuda", dtype=half, enabled=half is not None):
            loss = run(hidden, target)
        loss.backward()
        optimizer.step()
        assert loss.isfinite()


def held_out(head):
    head.eval()
    with torch.no_grad():
        return torch.stack([head.exact_loss(*batch(10_000 + n)) for n in range(8)]).mean().item()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_trains_under_autocast(name, half):
    head, plain = head_of(name), head_of(name)
    train(head, range(300), half=half)
    train(plain, range(300))
    assert all(tensor.isfinite().all() for tensor in head.state_dict().values())
    # The designs that sum only a set of classes are biased, with and without autocast.
    assert held_out(head) == pytest.approx(held_out(plain), rel=0.05)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["learned, rebuilt", "clustered, rebuilt", "budget, rebuilt", "explicit, rebuilt"])
def test_a_compiled_head_learns(name, sparse):
    torch._dynamo.reset()
    head, plain = head_of(name, sparse=sparse), head_of(name, sparse=sparse)
    before = {key: value.clone() for key, value in head.sampler.state_dict().items()}
    optimizers = (RowAdagrad(each.parameters(), 0.2) if sparse else None for each in (head, plain))
    train(head, range(150), run=torch.compile(head, fullgraph=True), optimizer=next(optimizers))
    train(plain, range(150), optimizer=next(optimizers))
    after, expected = head.sampler.state_dict(), plain.sampler.state_dict()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {key for key in expected if not torch.equal(expected[key], before[key])}
    assert held_out(head) == pytest.approx(held_out(plain), rel=0.05)


@pytest.fixture
def process(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(D, D)
        self.head = ClassHead(D, C, sampler=SAMPLERS["learned, rebuilt"](), sparse=sparse)

    def forward(self, hidden, target):
        return self.head(self.encoder(hidden), target)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_one_process_of_ddp_trains_as_no_ddp(process, sparse):
    losses = []
    for wrap in (lambda model: model, lambda model: DistributedDataParallel(parallel.prepare(model))):
        model = Model(sparse).cuda()
        run = wrap(model)
        optimizer = RowAdagrad(model.head.parameters(), 0.2)
        rest = torch.optim.Adagrad(model.encoder.parameters(), 0.01)
        for step in range(100):
            torch.manual_seed(step)
            loss = run(*batch(step))
            optimizer.zero_grad()
            rest.zero_grad()
            loss.backward()
            optimizer.step()
            rest.step()
            losses.append(loss.item())
    assert losses[:100] == pytest.approx(losses[100:], rel=0.02)


def test_a_sharded_head_trains_and_predicts(process):
    head, plain = fully_shard(head_of("learned, rebuilt")), head_of("learned, rebuilt")
    train(head, range(100))
    train(plain, range(100))
    hidden, _ = batch(7)
    torch.testing.assert_close(head.topk(hidden, 5).log_prob, plain.topk(hidden, 5).log_prob, rtol=0.2, atol=0.5)
    assert held_out(head) == pytest.approx(held_out(plain), rel=0.05)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_head_trains(use_reentrant):
    head = head_of("learned, rebuilt")

    def run(hidden, target):
        return checkpoint(head, hidden.requires_grad_(), target, use_reentrant=use_reentrant)

    train(head, range(100), run=run)
    assert head.sampler.schedule.steps == 100


def test_a_state_moves_between_devices_and_continues():
    head = head_of("learned, rebuilt")
    train(head, range(EVERY + 5))
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    for device in ("cpu", "cuda"):
        file.seek(0)
        with torch.device("meta"):
            other = ClassHead(D, C, sampler=Learned(WEIGHTS.cpu(), K, every=EVERY, order="cluster"))
        other.load_state_dict(torch.load(file, map_location=device, weights_only=True), assign=True)
        hidden, target = (x.to(device) for x in batch(0))
        assert other(hidden, target).isfinite()
        assert other.sampler.device.type == device
        for name, tensor in head.sampler.state_dict().items():
            if "progress" not in name and "label" not in name:
                torch.testing.assert_close(tensor.cpu(), other.sampler.state_dict()[name].cpu(), rtol=0.1, atol=0.01)
    twin = copy.deepcopy(head).cpu().cuda()
    generators = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
    hidden, target = batch(1)
    draws = [
        each.sampler(target, hidden=hidden, generator=seed) for each, seed in zip((head, twin), generators, strict=True)
    ]
    assert torch.equal(draws[0].ids(), draws[1].ids())
    assert torch.equal(draws[0].log_kappa(), draws[1].log_kappa())


def test_a_moving_average_of_a_head_evaluates():
    head = head_of("learned, rebuilt")
    average = AveragedModel(head, use_buffers=True)
    for step in range(60):
        train(head, [step])
        average.update_parameters(head)
    assert average.module(*batch(3)).isfinite()
    assert held_out(average.module) < held_out(head_of("learned, rebuilt"))


def test_torch_clips_sparse_gradients():
    head = head_of("learned, rebuilt", sparse=True)
    head(*batch(0)).backward()
    assert head.weight.grad.is_sparse
    before, after = (torch.nn.utils.clip_grad_norm_(head.parameters(), norm).item() for norm in (1e-3, 1.0))
    assert before > after == pytest.approx(1e-3, rel=1e-3)
    torch.nn.utils.clip_grad_value_(head.parameters(), 1e-5)
    assert head.weight.grad.coalesce().values().abs().max() <= 1e-5
