"""Heads follow their parameters: initialised again, replaced by others, moved from the meta device."""

import copy
import pickle

import pytest
import torch

from manyclass import ClassCounts, ClassHead, HierarchicalHead
from manyclass.samplers import Exhaustive, Systematic

# torch's compiler imports deprecated parts of torch, and torch 2.11 warns about every sparse gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore:Sparse invariant checks:UserWarning"
)

C, D, B = 40, 6, 5
MAKE = {
    "counts": lambda **options: ClassHead(D, C, counts=torch.arange(C), sampler=Exhaustive(C), **options),
    "no counts": lambda **options: ClassHead(D, C, sampler=Exhaustive(C), **options),
    "no bias": lambda **options: ClassHead(D, C, sampler=Exhaustive(C), bias=False, **options),
    "hierarchical": lambda **options: HierarchicalHead(D, C, counts=torch.arange(C), **options),
}


def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(B, D, generator=generator), torch.randint(0, C, (B,), generator=generator)


@pytest.mark.parametrize("name", MAKE)
def test_parameters_are_reset_to_those_of_a_new_head(name):
    torch.manual_seed(0)
    new, head = MAKE[name](), MAKE[name](dtype=torch.float64).float()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    torch.manual_seed(0)
    head.reset_parameters()
    for mine, other in zip(head.parameters(), new.parameters(), strict=True):
        assert mine.requires_grad
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", MAKE)
def test_a_head_on_meta_becomes_a_new_head(name):
    torch.manual_seed(0)
    new = MAKE[name]()
    head = MAKE[name](device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    head.reset_parameters()
    assert torch.equal(head.topk(batch()[0], 5).ids, new.topk(batch()[0], 5).ids)


def test_resetting_leaves_a_shared_weight_alone():
    embedding = torch.nn.Embedding(C, D)
    before = embedding.weight.detach().clone()
    head = ClassHead.tied(embedding, counts=torch.arange(1, C + 1), sampler=Exhaustive(C))
    with torch.no_grad():
        head.bias.zero_()
    head.reset_parameters()
    assert torch.equal(embedding.weight, before)
    assert head.bias[-1] > head.bias[0]


@pytest.mark.parametrize("shared", [True, False], ids=["the sampler's counts", "separate counts"])
def test_a_resized_head_is_reset_with_as_many_counts(shared):
    counts = ClassCounts(torch.arange(1, C + 1))
    head = ClassHead(D, C, counts=counts, sampler=Systematic(counts if shared else copy.deepcopy(counts), 5))
    head.resize(C + 3)
    head.reset_parameters()
    assert counts.num_classes == (C + 3 if shared else C)
    torch.testing.assert_close(head.bias[1] - head.bias[0], torch.tensor(2.0).log())
    torch.testing.assert_close(head.bias[C:], head.bias[0].expand(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
@pytest.mark.parametrize("name", MAKE)
def test_a_compiled_sparse_gradient_reaches_parameters_that_were_assigned(name, copied):
    torch._dynamo.reset()
    torch.manual_seed(0)
    head = MAKE[name](sparse=True)
    replaced = head.weight
    head.load_state_dict(copy.deepcopy(head.state_dict()), assign=True)
    head = copied(head)
    hidden, target = batch()
    head(hidden, target).backward()
    expected = head.weight.grad.to_dense()
    head.zero_grad()
    torch.compile(head, backend="eager", fullgraph=True)(hidden, target).backward()
    assert head.weight.grad.is_sparse
    torch.testing.assert_close(head.weight.grad.to_dense(), expected)
    assert replaced.grad is None


@pytest.mark.parametrize("name", MAKE)
def test_a_head_in_half_precision_keeps_working(name):
    head = MAKE[name]().bfloat16()
    hidden, target = batch()
    head(hidden.bfloat16(), target).backward()
    assert head.weight.grad.dtype == torch.bfloat16
    if isinstance(head, ClassHead):
        assert head.to_linear()(hidden.bfloat16()).shape == (B, C)
    assert head.topk(hidden.bfloat16(), 3).ids.shape == (B, 3)
