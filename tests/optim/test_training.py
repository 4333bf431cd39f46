"""Row optimisers in a training step: real heads, accumulation, loss scaling."""

import pytest
import torch

from manyclass import ClassHead
from manyclass.optim import RowSGD, clip_grad_norm_
from manyclass.samplers import Importance, Systematic
from tests.optim.tables import OURS, TWINS, identical, parameters, same, set_gradients

C, D, B = 40, 5, 6


def head_and_twin():
    heads = []
    for sparse in (True, False):
        torch.manual_seed(0)
        heads.append(ClassHead(D, C, sampler=Systematic(torch.ones(C), 8), sparse=sparse, dtype=torch.float64))
    return heads


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(B, D, dtype=torch.float64, generator=generator), torch.randint(0, C, (B,), generator=generator)


@pytest.mark.parametrize("name", [name for name in TWINS if "SGD" in name or "Adagrad" in name])
def test_a_head_with_sparse_gradients_trains_as_one_with_dense_ones(name):
    head, twin_head = head_and_twin()
    optimizer, twin = TWINS[name][0](head.parameters()), TWINS[name][1](twin_head.parameters())
    for step in range(15):
        for h, o in ((head, optimizer), (twin_head, twin)):
            if h is head and isinstance(o, RowSGD):
                # Scores use a row as it was after its last update; it equals the twin's only after catching up.
                o.catch_up()
            o.zero_grad()
            h(*batch(step), generator=torch.Generator().manual_seed(step)).backward()
            assert h.weight.grad.is_sparse == h.bias.grad.is_sparse == (h is head)
            o.step()
    if isinstance(optimizer, RowSGD):
        optimizer.catch_up()
    same(head.parameters(), twin_head.parameters())


@pytest.mark.parametrize("name", OURS)
def test_every_row_optimiser_learns(name):
    torch.manual_seed(0)
    centres = torch.randn(C, D)
    target = torch.arange(C)
    hidden = centres[target] + 0.1 * torch.randn(len(target), D)
    head = ClassHead(D, C, sampler=Importance(torch.ones(C), 8), sparse=True)
    optimizer = OURS[name](head.parameters())
    before = head.exact_loss(hidden, target).item()
    for _ in range(30):
        optimizer.zero_grad()
        head(hidden, target).backward()
        clip_grad_norm_(head.parameters(), 5.0)
        optimizer.step()
    assert head.exact_loss(hidden, target).item() < 0.95 * before


@pytest.mark.parametrize("name", OURS)
def test_accumulated_gradients_are_those_of_the_sum(name):
    heads = [head_and_twin()[0] for _ in range(2)]
    optimizers = [OURS[name](head.parameters()) for head in heads]
    for step in range(3):
        losses = [[h(*batch(s), generator=torch.Generator().manual_seed(s)) for s in (step, step + 7)] for h in heads]
        sum(losses[0]).backward()
        for loss in losses[1]:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(heads[0].parameters(), heads[1].parameters())


@pytest.mark.parametrize("name", OURS)
def test_a_loss_may_be_scaled_and_an_infinite_gradient_skips_the_step(name):
    heads = [head_and_twin()[0] for _ in range(2)]
    optimizers = [OURS[name](head.parameters()) for head in heads]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        broken = step == 2
        for h, o in zip(heads, optimizers, strict=True):
            o.zero_grad()
            loss = h(*batch(step), generator=torch.Generator().manual_seed(step))
            if h is heads[0]:
                before = [p.detach().clone() for p in h.parameters()]
                scaler.scale(loss).backward()
                if broken:
                    h.weight.grad._values()[0, 0] = torch.inf
                scaler.unscale_(o)
                clip_grad_norm_(h.parameters(), 0.3)
                scaler.step(o)
                scaler.update()
                if broken:
                    identical(h.parameters(), before)
            elif not broken:
                loss.backward()
                clip_grad_norm_(h.parameters(), 0.3)
                o.step()
    assert scaler.get_scale() == 512
    same(heads[0].parameters(), heads[1].parameters())


def test_the_optimiser_gets_the_clipped_gradients():
    params = parameters()
    optimizer = RowSGD(params, 1.0)
    before = [p.detach().clone() for p in params]
    set_gradients(params, torch.tensor([3, 3, 1]), 0)
    clip_grad_norm_(params, 0.25)
    optimizer.step()
    moved = torch.cat([(p - b).detach().flatten() for p, b in zip(params, before, strict=True)])
    torch.testing.assert_close(moved.norm().item(), 0.25, rtol=1e-5, atol=0)
