"""Only products are in half precision; log-sum-exp, κ and losses are in float32."""

import pytest
import torch
from torch import nn

from manyclass import Block, Candidates, ClassHead, HierarchicalHead, ScorerHead
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


def sure_batch(vectors):
    """Return targets, the last class among them, and hidden vectors that make them almost certain."""
    target = torch.randint(0, len(vectors), (B,), generator=torch.Generator().manual_seed(0))
    target[0] = len(vectors) - 1
    return 400 * vectors.detach().float()[target], target


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_DTYPES])
def test_no_exact_loss_is_negative_and_no_exact_probability_above_1(monkeypatch, dtype, similarity):
    # Several chunks of classes, the last with a single class.
    monkeypatch.setattr("manyclass.heads.exact.MAX_SCORES", 256 * 1000)
    torch.manual_seed(0)
    sampler = Importance(torch.ones(4001), 100)
    head = ClassHead(D, 4001, sampler=sampler, similarity=similarity, scale=60.0, dtype=dtype)
    hidden, target = sure_batch(head.weight)
    hidden = hidden.to(dtype)
    loss = head.exact_loss(hidden, target, reduction="none")
    assert (loss >= 0).all()
    assert (head.log_prob(hidden, target.unsqueeze(1)) <= 0).all()
    assert (head.topk(hidden, 3).log_prob <= 0).all()
    with torch.no_grad():
        assert torch.equal(head.exact_loss(hidden, target, reduction="none"), loss)


@pytest.mark.parametrize("half", HALF_DTYPES)
def test_no_exact_loss_is_negative_under_autocast(half):
    head, _, _ = head_and_batch()
    hidden, target = sure_batch(head.weight)
    with torch.autocast("cpu", dtype=half):
        assert (head.exact_loss(hidden, target, reduction="none") >= 0).all()
        assert (head.log_prob(hidden, target.unsqueeze(1)) <= 0).all()


def test_no_exact_loss_of_a_scorer_is_negative():
    torch.manual_seed(0)
    classes = nn.Embedding(C, D)

    def score(hidden, ids):
        return hidden @ classes(ids).transpose(1, 2)

    head = ScorerHead(score, Importance(torch.ones(C), 100))
    hidden, target = sure_batch(classes.weight)
    assert (head.exact_loss(hidden, target, reduction="none") >= 0).all()
    assert (head.log_prob(hidden, target.unsqueeze(1)) <= 0).all()
