"""On a GPU the rows are those of the CPU, and no step synchronises with the device."""

import pytest
import torch

from manyclass import ClassHead
from manyclass.optim import RowSGD, clip_grad_norm_
from manyclass.samplers import ErrorProbe
from tests.optim.tables import OURS, parameters, set_gradients
from tests.optim.test_rate import MAKERS
from tests.optim.test_sgd import rows
from tests.tables import SAMPLERS
from tests.test_gpu import no_sync

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

C, D, B = 3000, 32, 48


@pytest.mark.parametrize("name", OURS)
def test_rows_equal_those_on_the_cpu(name):
    params = parameters()
    moved = [torch.nn.Parameter(p.detach().cuda()) for p in params]
    optimizer, other = OURS[name](params), OURS[name](moved)
    for step in range(70):
        set_gradients(params, rows(step), step)
        for p, q in zip(params, moved, strict=True):
            q.grad = p.grad.cuda()
        for p, o in ((params, optimizer), (moved, other)):
            clip_grad_norm_(p, 2.0)
            o.step()
    if isinstance(optimizer, RowSGD):
        optimizer.catch_up()
        other.catch_up()
    for p, q in zip(params, moved, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", OURS)
def test_a_step_does_not_synchronise(name, sparse):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=SAMPLERS["systematic"](torch.ones(C), 60, None), sparse=sparse).cuda()
    # A probe reads the error that it measures.
    head.own_probe = ErrorProbe(every=1000)
    optimizer = OURS[name](head.parameters())
    hidden, target = torch.randn(B, D, device="cuda"), torch.randint(0, C, (B,), device="cuda")

    def train():
        optimizer.zero_grad()
        head(hidden, target).backward()
        clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()

    train()
    with no_sync():
        # Enough steps for the table of the history to grow.
        for _ in range(70):
            train()
    assert head.weight.isfinite().all()


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_with_a_learning_rate_on_the_device_does_not_synchronise(name, impl):
    found = []
    for lr in (0.25, torch.tensor(0.25, device="cuda")):
        torch.manual_seed(0)
        head = ClassHead(D, C, sampler=SAMPLERS["systematic"](torch.ones(C), 60, None), sparse=True, impl=impl).cuda()
        optimizer = MAKERS[name](head.parameters(), lr, impl=impl)
        hidden, target = torch.randn(B, D, device="cuda"), torch.randint(0, C, (B,), device="cuda")
        head(hidden, target).backward()
        optimizer.step()
        with no_sync():
            optimizer.zero_grad()
            head(hidden, target).backward()
            optimizer.step()
        found.append(list(head.parameters()))
    torch.testing.assert_close(*found)
