"""Only products are in half precision; log-sum-exp, κ and losses are in float32."""

import pytest
import torch
from torch import nn

from manyclass import Block, Candidates, ClassHead, HierarchicalHead
from manyclass.samplers import Importance, no_learning, no_schedule, no_vectors
from tests.tables import OBJECTIVES

C, D, B = 5000, 32, 16
HALF_DTYPES = [torch.bfloat16, torch.float16]


def head_and_batch(objective=None, **options):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=Importance(torch.ones(C), 100), objective=objective, **options)
    return head, torch.randn(B, D), torch.randint(0, C, (B,))


@pytest.mark.parametrize("half", HALF_DTYPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_autocast_gives_float32_losses_near_the_float32_ones(name, half):
    head, hidden, target = head_and_batch(OBJECTIVES[name][0])
    full = head(hidden, target, reduction="none", generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=half):
        loss = head(hidden, target, reduction="none", generator=torch.Generator().manual_seed(1))
        exact = head.exact_loss(hidden, target)
    assert loss.dtype == exact.dtype == torch.float32
    torch.testing.assert_close(loss, full, rtol=0.02, atol=0.02)
    torch.testing.assert_close(exact, head.exact_loss(hidden, target), rtol=0.02, atol=0.02)
    loss.sum().backward()
    assert torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("half", HALF_DTYPES)
def test_a_head_of_half_precision_has_float32_losses(half):
    head, hidden, target = head_and_batch()
    head = head.to(half)
    loss = head(hidden.to(half), target)
    assert loss.dtype == torch.float32
    loss.backward()
    assert head.weight.grad.dtype == half
    assert head.exact_loss(hidden.to(half), target).dtype == torch.float32


class RareClass(nn.Module):
    """A sampler that draws one class, which stands for more classes than float16 can count."""

    num_classes, device, learns = C, None, False
    attach, advance, observe = no_vectors, no_schedule, no_learning

    def draw(self, target, exclude, *, hidden, generator):
        block = Block(torch.tensor([[7]]), torch.tensor([[40.0]], dtype=torch.float64))
        return Candidates((block,), exclude, lambda: torch.full((len(target),), -40.0, dtype=torch.float64), C)

    def refresh(self):
        pass

    def resize(self, num_classes):
        pass


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_large_log_kappa_does_not_overflow_float16(name):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=RareClass(), objective=OBJECTIVES[name][0], bias=False)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head(torch.randn(B, D), torch.zeros(B, dtype=torch.int64), reduction="none")
    assert torch.isfinite(loss).all()
    if name == "likelihood":
        assert (loss - 40).abs().max() < 10
    loss.sum().backward()
    assert torch.isfinite(head.weight.grad).all()


def test_a_hierarchical_head_has_float32_losses_under_autocast():
    head = HierarchicalHead(D, C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(torch.randn(B, D), torch.randint(0, C, (B,))).dtype == torch.float32
