"""Heads compile into one graph, with dense and with sparse gradients."""

import copy

import pytest
import torch

from manyclass import ClassHead
from manyclass.samplers import Exhaustive, Importance, Systematic, WithExplicit

# torch's compiler imports deprecated parts of torch, and torch 2.11 warns about every sparse gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore:Sparse invariant checks:UserWarning"
)

C, D, B = 400, 8, 6

SHARED = {
    "exhaustive": lambda: Exhaustive(C),
    "importance": lambda: Importance(torch.rand(C) + 0.1, 16),
    "systematic": lambda: Systematic(1 / torch.arange(1, C + 1), 16),
    "minibatch explicit": lambda: WithExplicit(Systematic(torch.rand(C) + 0.1, 16), "batch"),
    "fixed set explicit": lambda: WithExplicit(Importance(torch.rand(C) + 0.1, 16), torch.arange(5)),
}


@pytest.fixture(autouse=True)
def _reset_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", SHARED)
def test_a_compiled_head_gives_the_loss_and_gradients_of_an_eager_one(name, sparse):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=SHARED[name](), sparse=sparse)
    hidden, target = torch.randn(B, D), torch.randint(0, C, (B,))
    # Machine code takes long to compile, so one case is; the others end as graphs of torch's own operators.
    backend = "inductor" if name == "systematic" and sparse else "aot_eager"
    # With the random numbers of eager torch both make the same draw.
    with torch._inductor.config.patch(fallback_random=True):
        results = []
        for run in (head, torch.compile(head, backend=backend, fullgraph=True)):
            for _ in range(2):
                head.zero_grad(set_to_none=True)
                x = hidden.clone().requires_grad_()
                torch.manual_seed(1)
                loss = run(x, target)
                loss.backward()
            assert head.weight.grad.is_sparse == head.bias.grad.is_sparse == sparse
            results.append((loss.detach(), x.grad, head.weight.grad.to_dense(), head.bias.grad.to_dense()))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-6)


def test_compiled_sparse_gradients_accumulate_in_the_right_head():
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=Exhaustive(C), sparse=True)
    other = copy.deepcopy(head)
    hidden, target = torch.randn(B, D), torch.randint(0, C, (B,))
    run, run_other = (torch.compile(each, backend="aot_eager", fullgraph=True) for each in (head, other))
    run(hidden, target).backward()
    once = head.weight.grad.to_dense()
    run(hidden, target).backward()
    torch.testing.assert_close(head.weight.grad.to_dense(), 2 * once)
    assert other.weight.grad is None
    run_other(hidden, target).backward()
    torch.testing.assert_close(other.weight.grad.to_dense(), once)
    torch.testing.assert_close(head.weight.grad.to_dense(), 2 * once)
