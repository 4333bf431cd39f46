"""Properties of every row optimiser."""

import copy

import pytest
import torch

from tests.optim.tables import (
    OURS,
    TWINS,
    C,
    D,
    identical,
    parameters,
    same,
    set_dense_gradients,
    set_gradients,
    sparse,
)

pytestmark = pytest.mark.usefixtures("kernels")

ALL_ROWS_SOME_TWICE = torch.tensor([*range(C - 1, -1, -1), 3, 0, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gradients", [set_gradients, set_dense_gradients], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", TWINS)
def test_it_equals_torchs_dense_optimiser_if_all_rows_have_a_gradient(name, gradients, dtype):
    params, theirs = parameters(dtype), parameters(dtype)
    optimizer, twin = TWINS[name][0](params), TWINS[name][1](theirs)
    for step in range(6):
        gradients(params, ALL_ROWS_SOME_TWICE, step)
        set_dense_gradients(theirs, ALL_ROWS_SOME_TWICE, step)
        optimizer.step()
        twin.step()
        same(params, theirs)


@pytest.mark.parametrize("name", TWINS)
def test_sparse_and_dense_gradients_may_alternate(name):
    params, theirs = parameters(), parameters()
    optimizer, twin = TWINS[name][0](params), TWINS[name][1](theirs)
    for step in range(6):
        (set_gradients, set_dense_gradients)[step % 2](params, ALL_ROWS_SOME_TWICE, step)
        set_dense_gradients(theirs, ALL_ROWS_SOME_TWICE, step)
        optimizer.step()
        twin.step()
    same(params, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OURS)
def test_rows_without_a_gradient_keep_every_bit(name, dtype):
    params = parameters(dtype)
    optimizer = OURS[name](params)
    set_gradients(params, ALL_ROWS_SOME_TWICE, 0)
    optimizer.step()
    for step, ids in enumerate([torch.tensor([2, 5, 2]), torch.tensor([9])]):
        before = copy.deepcopy(params)
        set_gradients(params, ids, step)
        optimizer.step()
        for p, old in zip(params, before, strict=True):
            updated = torch.zeros(C, dtype=torch.bool).index_fill(0, ids, True)
            assert torch.equal(p[~updated], old[~updated])
            assert (p[updated] != old[updated]).all()


@pytest.mark.parametrize("name", OURS)
def test_an_empty_gradient_moves_nothing_and_none_is_no_step(name):
    params = parameters()
    optimizer = OURS[name](params)
    nothing = torch.tensor([], dtype=torch.int64)
    before = copy.deepcopy(params)
    optimizer.step()
    assert not optimizer.state
    for _ in range(2):
        set_gradients(params, nothing, 0)
        optimizer.step()
    identical(params, before)


@pytest.mark.parametrize("name", OURS)
def test_repeated_rows_are_the_same_as_their_sum(name):
    params, theirs = parameters(), parameters()
    optimizer, other = OURS[name](params), OURS[name](theirs)
    for step in range(3):
        set_gradients(params, torch.tensor([4, 1, 4, 4, 7]), step)
        for p, q in zip(params, theirs, strict=True):
            q.grad = p.grad.coalesce()
        optimizer.step()
        other.step()
    same(params, theirs)


@pytest.mark.parametrize("name", OURS)
def test_a_step_does_not_change_gradients(name):
    for gradients in (set_gradients, set_dense_gradients):
        params = parameters()
        optimizer = OURS[name](params)
        for step in range(2):
            gradients(params, torch.tensor([4, 1, 4]), step)
            before = [p.grad.to_dense().clone() for p in params]
            optimizer.step()
            identical([p.grad.to_dense() for p in params], before)


@pytest.mark.parametrize("name", OURS)
def test_tables_have_any_number_of_dimensions(name):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((C, D, 2), (C,), ())]
    optimizer = OURS[name](params)
    for _ in range(3):
        for p in params[:2]:
            p.grad = sparse(torch.tensor([1, 1]), torch.ones(2, *p.shape[1:]), p)
        params[2].grad = torch.tensor(1.0)
        optimizer.step()
    for p in params[:2]:
        assert (p[1] < 1).all()
        assert (p[2:] == 1).all()
    assert params[2] < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OURS)
def test_half_precision_is_float32_rounded_once_a_step(name, dtype):
    params = parameters(dtype)
    optimizer = OURS[name](params)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    other = OURS[name](wide)
    for step in range(4):
        # Both get the same gradients, rounded to half precision.
        set_gradients(params, torch.tensor([4, 1, 4, 7]), step)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        other.step()
        for p, q in zip(params, wide, strict=True):
            q.data = q.data.to(dtype).float()
            assert torch.equal(p.float(), q)
    for state in optimizer.state.values():
        assert all(table.dtype == torch.float32 for key, table in state.items() if key not in ("last", "history"))


@pytest.mark.parametrize("name", TWINS)
def test_groups_have_their_own_options_and_schedulers_change_them(name):
    params, theirs = parameters(), parameters()
    optimizer, twin = (
        make([{"params": p[:1], "lr": 0.3}, {"params": p[1:]}])
        for make, p in zip(TWINS[name], (params, theirs), strict=True)
    )
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in (optimizer, twin)]
    for step in range(6):
        set_gradients(params, ALL_ROWS_SOME_TWICE, step)
        set_dense_gradients(theirs, ALL_ROWS_SOME_TWICE, step)
        for o, schedule in zip((optimizer, twin), schedules, strict=True):
            o.step()
            schedule.step()
    same(params, theirs)


@pytest.mark.parametrize("name", OURS)
def test_a_closure_is_called_with_gradients_enabled(name):
    params = parameters()
    optimizer = OURS[name](params)

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize("name", OURS)
def test_a_graph_that_saw_the_old_rows_is_refused(name):
    (weight, _) = params = parameters()
    optimizer = OURS[name](params)
    loss = weight.square().sum()
    set_gradients(params, torch.tensor([1, 2]), 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
