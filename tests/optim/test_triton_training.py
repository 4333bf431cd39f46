"""Clipping, loss scaling, accumulation and tied tables give with Triton's kernels the rows of eager code."""

import pytest
import torch
from torch import nn

from manyclass import ClassHead
from manyclass.optim import RowAdagrad, RowAdam, RowSGD, clip_grad_norm_
from manyclass.samplers import Systematic

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
]

C, D, B, STEPS = 40, 5, 6, 3
OPTIMISERS = {
    "RowSGD": lambda p, impl: RowSGD(p, 0.1, impl=impl),
    "RowAdagrad": lambda p, impl: RowAdagrad(p, 0.1, impl=impl),
    "RowAdagrad, by row": lambda p, impl: RowAdagrad(p, 0.1, by_row=True, impl=impl),
    "RowAdam": lambda p, impl: RowAdam(p, 0.1, impl=impl),
}
DENSE = {
    "RowAdagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    # Rows without a gradient rest in RowAdam, so every row has one in its test.
    "RowAdam": lambda p: torch.optim.Adam(p, 0.1),
}


def head_of(impl, embedding=None, *, k=8, sparse=True):
    torch.manual_seed(0)
    sampler = Systematic(torch.ones(C), k)
    if embedding is None:
        return ClassHead(D, C, sampler=sampler, sparse=sparse, impl=impl)
    return ClassHead.tied(embedding, sampler=sampler, bias=False, impl=impl)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(C, (B,), generator=generator)
    # A row of several targets has several gradients.
    target[1] = target[0]
    return torch.randn(B, D, generator=generator), target


def loss_of(head, step):
    return head(*batch(step), generator=torch.Generator().manual_seed(step))


def clipped(head, optimizer, step):
    loss_of(head, step).backward()
    clip_grad_norm_(head.parameters(), 0.3)
    optimizer.step()


def clipped_by_torch(head, optimizer, step):
    loss_of(head, step).backward()
    nn.utils.clip_grad_norm_(head.parameters(), 0.3)
    optimizer.step()


def accumulated(head, optimizer, step):
    loss_of(head, step).backward()
    loss_of(head, step + 7).backward()
    optimizer.step()


def scaled(head, optimizer, step, scaler):
    scaler.scale(loss_of(head, step)).backward()
    if step == 1:
        head.weight.grad._values()[0, 0] = torch.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def trained(impl, name, run, *, needs_scaler=False):
    head = head_of(impl)
    optimizer = OPTIMISERS[name](head.parameters(), impl)
    extra = [torch.amp.GradScaler("cpu", init_scale=1024.0)] if needs_scaler else []
    for step in range(STEPS):
        optimizer.zero_grad()
        run(head, optimizer, step, *extra)
    return [p.detach() for p in head.parameters()]


@pytest.mark.parametrize("run", [clipped, clipped_by_torch, accumulated])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_clipping_and_accumulation_give_the_rows_of_eager_code(name, run):
    ours, eager = (trained(impl, name, run) for impl in ("triton", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_scaled_loss_gives_the_rows_of_eager_code_and_skips_an_infinite_gradient(name):
    ours, eager = (trained(impl, name, scaled, needs_scaler=True) for impl in ("triton", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    assert all(p.isfinite().all() for p in ours)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_two_backward_passes_are_one_over_both_losses(name):
    """The update is not linear in the gradient, so the gradients of a row must be summed before it."""
    found = []
    for together in (True, False):
        head = head_of("triton")
        optimizer = OPTIMISERS[name](head.parameters(), "triton")
        losses = [loss_of(head, step) for step in (0, 7)]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        optimizer.step()
        found.append([p.detach() for p in head.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def trained_tied(impl, make, *, sparse, k):
    torch.manual_seed(0)
    embedding = nn.Embedding(C, D, sparse=sparse)
    head = head_of(impl, embedding, k=k)
    optimizer = make(embedding.parameters())
    for step in range(STEPS):
        hidden, target = batch(step)
        optimizer.zero_grad()
        # The targets are inputs too, so that their rows have gradients of both kinds.
        loss = head(hidden + embedding(target), target, generator=torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
    return embedding.weight.detach()


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_tied_embedding_and_head_have_one_gradient(name):
    ours, eager = (
        trained_tied(impl, lambda p, impl=impl: OPTIMISERS[name](p, impl), sparse=True, k=8)
        for impl in ("triton", "eager")
    )
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DENSE)
def test_a_tied_table_trains_as_by_the_dense_optimiser(name):
    # k of all classes: in every step every row has a gradient.
    ours = trained_tied("triton", lambda p: OPTIMISERS[name](p, "triton"), sparse=True, k=C)
    dense = trained_tied("eager", DENSE[name], sparse=False, k=C)
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=2e-5)
