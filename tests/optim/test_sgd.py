"""RowSGD applies the steps that a row missed, exactly."""

import copy

import pytest
import torch

from manyclass.optim import RowSGD, sgd
from tests.optim.tables import C, identical, parameters, same, set_dense_gradients, set_gradients

OPTIONS = {
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.05},
    "both": {"momentum": 0.9, "weight_decay": 0.05},
    "neither": {},
}
SCHEDULES = {
    "constant": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
    "one cycle, of momentum too": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=80),
}


def rows(step):
    """Return a few row ids, none in some steps; never row 0, and row 1 in the first step only."""
    if step == 0:
        return torch.tensor([1, 5])
    number = (3, 1, 0, 5)[step % 4]
    return torch.randint(2, C, (number,), generator=torch.Generator().manual_seed(step))


def train(params, optimizer, set_all, steps, schedule=None):
    for step in range(steps):
        set_all(params, rows(step), step)
        optimizer.step()
        if schedule is not None:
            schedule.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_after_catch_up_it_equals_torchs_sgd_for_any_rows_with_a_gradient(options, schedule, dtype):
    params, theirs = parameters(dtype), parameters(dtype)
    optimizer, twin = RowSGD(params, 0.1, **OPTIONS[options]), torch.optim.SGD(theirs, 0.1, **OPTIONS[options])
    train(params, optimizer, set_gradients, 75, SCHEDULES[schedule](optimizer))
    train(theirs, twin, set_dense_gradients, 75, SCHEDULES[schedule](twin))
    optimizer.catch_up()
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_with_a_gradient_equals_that_of_torchs_sgd(options):
    params, theirs = parameters(), parameters()
    optimizer, twin = RowSGD(params, 0.1, **OPTIONS[options]), torch.optim.SGD(theirs, 0.1, **OPTIONS[options])
    for step in range(30):
        ids = rows(step)
        set_gradients(params, ids, step)
        set_dense_gradients(theirs, ids, step)
        optimizer.step()
        twin.step()
        same([p[ids] for p in params], [q[ids] for q in theirs])


def test_a_row_may_return_after_a_thousand_steps():
    params, theirs = parameters(), parameters()
    make = {"lr": 0.01, "momentum": 0.99, "weight_decay": 0.01}
    optimizer, twin = RowSGD(params, **make), torch.optim.SGD(theirs, **make)
    for step in range(1050):
        ids = torch.tensor([1, 2] if step in (0, 1049) else [3])
        set_gradients(params, ids, step)
        set_dense_gradients(theirs, ids, step)
        for o in (optimizer, twin):
            o.param_groups[0]["lr"] = 0.01 / (1 + step / 500)
            o.step()
    same([p[1:3] for p in params], [q[1:3] for q in theirs])
    optimizer.catch_up()
    same(params, theirs)


def test_momentum_and_decay_may_be_switched_on_and_off():
    params, theirs = parameters(), parameters()
    optimizer, twin = RowSGD(params, 0.1), torch.optim.SGD(theirs, 0.1)
    for step in range(60):
        for o in (optimizer, twin):
            o.param_groups[0]["momentum"] = (0.0, 0.9, 0.5, 0.0)[step // 10 % 4]
            o.param_groups[0]["weight_decay"] = (0.0, 0.05)[step // 20 % 2]
        set_gradients(params, rows(step), step)
        set_dense_gradients(theirs, rows(step), step)
        optimizer.step()
        twin.step()
    optimizer.catch_up()
    same(params, theirs)


def test_catching_up_in_the_middle_changes_nothing_and_clears_the_history(monkeypatch):
    monkeypatch.setattr(sgd, "_CHUNK_ROWS", 4)
    params, theirs = parameters(), parameters()
    optimizer, twin = (RowSGD(p, 0.1, momentum=0.9, weight_decay=0.05) for p in (params, theirs))
    for step in range(40):
        for p, o in ((params, optimizer), (theirs, twin)):
            set_gradients(p, rows(step), step)
            o.step()
        if step % 7 == 0:
            optimizer.catch_up()
            assert "history" not in optimizer.state[params[0]]
    optimizer.catch_up()
    twin.catch_up()
    same(params, theirs)
    before = copy.deepcopy(params)
    optimizer.catch_up()
    identical(params, before)


def test_an_empty_gradient_is_a_step_for_rows_that_return():
    params, theirs = parameters(), parameters()
    optimizer, twin = RowSGD(params, 0.1, momentum=0.5), torch.optim.SGD(theirs, 0.1, momentum=0.5)
    for step, ids in enumerate(([1], [], [], [1])):
        set_gradients(params, torch.tensor(ids, dtype=torch.int64), step)
        set_dense_gradients(theirs, torch.tensor(ids, dtype=torch.int64), step)
        optimizer.step()
        twin.step()
    same([p[1] for p in params], [q[1] for q in theirs])


def test_plain_sgd_has_no_state():
    params = parameters()
    optimizer = RowSGD(params, 0.1)
    set_gradients(params, torch.tensor([1]), 0)
    optimizer.step()
    assert not any(optimizer.state.values())


def test_dense_gradients_leave_no_history():
    params = parameters()
    optimizer = RowSGD(params, 0.1, momentum=0.9)
    set_dense_gradients(params, torch.tensor([1]), 0)
    optimizer.step()
    assert set(optimizer.state[params[0]]) == {"momentum_buffer"}


def test_half_precision_catches_up_too():
    params, theirs = parameters(torch.bfloat16), parameters(torch.float32)
    optimizer, twin = (RowSGD(p, 0.1, momentum=0.9, weight_decay=0.05) for p in (params, theirs))
    for p, q in zip(params, theirs, strict=True):
        q.data = p.data.float()
    for o, p in ((optimizer, params), (twin, theirs)):
        set_gradients(p, torch.tensor([1]), 0)
        o.step()
        for step in range(200):
            set_gradients(p, torch.tensor([3]), step)
            o.step()
        o.catch_up()
    assert len({p.dtype for p in params}) == 1
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p[[0, 1, 2]].float(), q[[0, 1, 2]], rtol=0.02, atol=1e-3)
