"""Heads under `fully_shard`, which leaves sharded tables outside the forward pass."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from manyclass import ClassHead, HierarchicalHead, diagnose
from manyclass.inference import Index, estimate_log_z, ranks, top
from manyclass.samplers import Systematic

# torch's own code for sharding warns about deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

C, D, B = 300, 8, 12


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.encoder, self.head = nn.Linear(D, D), head

    def forward(self, hidden, target):
        return self.head(self.encoder(hidden), target)


HEADS = {
    "dense": lambda: ClassHead(D, C, counts=torch.arange(1, C + 1), sampler=Systematic(torch.ones(C), 20)),
    "sparse": lambda: ClassHead(D, C, sampler=Systematic(torch.ones(C), 20), sparse=True),
    "cosine without bias": lambda: ClassHead(
        D, C, sampler=Systematic(torch.ones(C), 20), similarity="cosine", bias=False
    ),
    "hierarchical": lambda: HierarchicalHead(D, C),
    "hierarchical, sparse": lambda: HierarchicalHead(D, C, sparse=True),
}
SHARDED = {
    "the head": lambda model, mesh: fully_shard(model.head, mesh=mesh),
    "its parent": lambda model, mesh: fully_shard(model, mesh=mesh),
    "both": lambda model, mesh: (fully_shard(model.head, mesh=mesh), fully_shard(model, mesh=mesh)),
}


def twins(name, sharded, mesh):
    torch.manual_seed(0)
    plain = Model(HEADS[name]())
    model = copy.deepcopy(plain)
    SHARDED[sharded](model, mesh)
    return model, plain, torch.randn(B, D), torch.randint(0, C, (B,))


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().to_dense()


@pytest.mark.parametrize("sharded", SHARDED)
@pytest.mark.parametrize("name", HEADS)
def test_training_gives_the_weights_of_a_head_that_is_not_sharded(name, sharded, mesh):
    *models, hidden, target = twins(name, sharded, mesh)
    for model in models:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(hidden, target).backward()
            optimizer.step()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole(mine), whole(other))


RESULTS = {
    "topk": lambda head, hidden, target: tuple(head.topk(hidden, 5)),
    "log_prob": lambda head, hidden, target: head.log_prob(hidden, target.unsqueeze(1)),
    "scores": lambda head, hidden, target: head.scores(hidden, target),
    "log_z": lambda head, hidden, target: head.log_z(hidden),
    "forward": lambda head, hidden, target: head(hidden, target, generator=torch.Generator().manual_seed(0)),
    "exact_loss": lambda head, hidden, target: head.exact_loss(hidden, target),
    "approximate_log_likelihood": lambda head, hidden, target: head.approximate_log_likelihood(
        hidden, target, generator=torch.Generator().manual_seed(0)
    ),
    "diagnose": lambda head, hidden, target: list(vars(diagnose(head, hidden, target, draws=2)).values()),
    "ranks": lambda head, hidden, target: ranks(head, hidden, target),
    "estimate": lambda head, hidden, target: (
        estimate_log_z(head, hidden, generator=torch.Generator().manual_seed(0)).log_z
    ),
}


def test_a_sharded_head_is_indexed(mesh):
    pytest.importorskip("faiss")
    model, plain, hidden, _ = twins("dense", "its parent", mesh)
    found, expected = (top(head, hidden, 5, index=Index.build(head, hidden)) for head in (model.head, plain.head))
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.log_prob, expected.log_prob)


@pytest.mark.parametrize("sharded", SHARDED)
@pytest.mark.parametrize("name", HEADS)
def test_results_are_those_of_a_head_that_is_not_sharded(name, sharded, mesh):
    model, plain, hidden, target = twins(name, sharded, mesh)
    results = ("topk", "log_prob", "forward") if isinstance(plain.head, HierarchicalHead) else RESULTS
    for result in results:
        if result == "forward" and isinstance(plain.head, HierarchicalHead):
            found, expected = (head(hidden, target) for head in (model.head, plain.head))
        else:
            found, expected = (RESULTS[result](head, hidden, target) for head in (model.head, plain.head))
        torch.testing.assert_close(found, expected, msg=lambda text, result=result: f"{result}: {text}")


@pytest.mark.parametrize("sharded", SHARDED)
@pytest.mark.parametrize("name", ["dense", "sparse", "cosine without bias"])
@pytest.mark.parametrize("result", ["exact_loss", "forward", "log_prob"])
def test_gradients_are_those_of_a_head_that_is_not_sharded(result, name, sharded, mesh):
    model, plain, hidden, target = twins(name, sharded, mesh)
    for head in (model.head, plain.head):
        RESULTS[result](head, hidden, target).mean().backward()
    for mine, other in zip(model.head.parameters(), plain.head.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), whole(other.grad))


def test_a_sharded_head_is_reset(mesh):
    torch.manual_seed(0)
    plain = ClassHead(D, C, counts=torch.arange(1, C + 1), sampler=Systematic(torch.ones(C), 20))
    head = ClassHead(D, C, counts=torch.arange(1, C + 1), sampler=Systematic(torch.ones(C), 20))
    fully_shard(head, mesh=mesh)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    head.reset_parameters()
    assert torch.equal(whole(head.bias), plain.bias)
    assert 0 < whole(head.weight).std() < 1


def test_a_sharded_head_is_not_resized(mesh):
    head = HEADS["dense"]()
    fully_shard(head, mesh=mesh)
    with pytest.raises(
        ValueError, match="`weight` must be whole to be resized, got one that is sharded: resize before"
    ):
        head.resize(C + 1)
    assert head.num_classes == head.sampler.num_classes == C
