"""Optimiser state is saved, copied and resized with its rows."""

import copy
import io
import pickle

import pytest
import torch

from manyclass import ClassCounts, ClassHead
from manyclass.optim import RowAdagrad, RowAdam, RowSGD
from manyclass.samplers import Importance
from tests.optim.tables import OURS, C, D, identical, parameters, set_gradients
from tests.optim.test_sgd import rows


def train(params, optimizer, steps):
    for step in steps:
        set_gradients(params, rows(step), step)
        optimizer.step()
    return params


def caught_up(params, optimizer):
    if isinstance(optimizer, RowSGD):
        optimizer.catch_up()
    return params


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OURS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, dtype):
    params = parameters(dtype)
    optimizer = OURS[name](params)
    # More steps in bfloat16 than it can count to.
    steps = 300 if dtype == torch.bfloat16 else 20
    train(params, optimizer, range(steps))
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = OURS[name](again)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for p, q in zip(params, again, strict=True):
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.state[q][key].dtype
                assert torch.equal(value, other.state[q][key])
            else:
                assert value["steps"] == other.state[q][key]["steps"]
                assert value["runs"] == other.state[q][key]["runs"]
                assert torch.equal(value["table"], other.state[q][key]["table"])
    for p, o in ((params, optimizer), (again, other)):
        caught_up(train(p, o, range(steps, steps + 20)), o)
    identical(params, again)


@pytest.mark.parametrize("name", OURS)
def test_a_state_can_be_loaded_more_than_once_also_into_a_copy(name):
    params = parameters()
    optimizer = OURS[name](params)
    train(params, optimizer, range(3))
    again, other = copy.deepcopy((params, optimizer))
    for _ in range(2):
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    other.load_state_dict(through_a_file(other.state_dict()))
    for p, o in ((params, optimizer), (again, other)):
        caught_up(train(p, o, range(3, 6)), o)
    identical(params, again)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", OURS)
def test_a_copy_of_an_optimiser_trains_its_own_parameters(name, how):
    params = parameters()
    optimizer = OURS[name](params)
    train(params, optimizer, range(10))
    again, other = how((params, optimizer))
    for p, o in ((params, optimizer), (again, other)):
        caught_up(train(p, o, range(10, 20)), o)
    identical(params, again)


def test_state_loaded_for_another_dtype_has_the_dtype_of_the_arithmetic():
    params, wide = parameters(torch.float32), parameters(torch.float64)
    optimizer, other = RowAdam(params), RowAdam(wide)
    train(params, optimizer, range(5))
    other.load_state_dict(optimizer.state_dict())
    state = other.state[wide[0]]
    assert {key: value.dtype for key, value in state.items()} == {
        "exp_avg": torch.float64,
        "exp_avg_sq": torch.float64,
        "steps": torch.float32,
    }
    train(wide, other, range(5, 10))


def sparse_head():
    torch.manual_seed(0)
    return ClassHead(D, C, sampler=Importance(ClassCounts(torch.ones(C)), 3), sparse=True)


def head_steps(head, optimizer, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        hidden = torch.randn(4, D, generator=generator)
        target = torch.randint(0, head.num_classes, (4,), generator=generator)
        optimizer.zero_grad()
        head(hidden, target, generator=generator).backward()
        optimizer.step()


# State of a new row, after five steps.
STARTS = {
    "RowSGD, momentum": {"momentum_buffer": 0, "last": 5},
    "RowSGD, decay": {"last": 5},
    "RowAdagrad": {"sum": 0},
    "RowAdagrad, started": {"sum": 0.3},
    "RowAdagrad, by row": {"sum": 0},
    "RowAdam": {"exp_avg": 0, "exp_avg_sq": 0, "steps": 0},
}


@pytest.mark.parametrize("name", STARTS)
def test_new_rows_have_the_initial_state_and_old_ones_keep_theirs(name):
    head = sparse_head()
    optimizer = OURS[name](head.parameters())
    head_steps(head, optimizer)
    before = copy.deepcopy([optimizer.state[p] for p in head.parameters()])
    head.resize(C + 4, optimizer=optimizer)
    for p, old in zip(head.parameters(), before, strict=True):
        for key, start in STARTS[name].items():
            table = optimizer.state[p][key]
            assert len(table) == C + 4
            assert torch.equal(table[:C], old[key])
            assert torch.equal(table[C:], torch.full_like(table[C:], start))
    head_steps(head, optimizer)
    head.resize(6, optimizer=optimizer)
    for p in head.parameters():
        assert all(len(optimizer.state[p][key]) == 6 for key in STARTS[name])
    head_steps(head, optimizer)
    caught_up(head.parameters(), optimizer)


def test_a_new_row_has_missed_no_steps():
    head = sparse_head()
    optimizer = RowSGD(head.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    head_steps(head, optimizer)
    head.resize(C + 2, optimizer=optimizer)
    before = head.weight.detach().clone()
    optimizer.catch_up()
    assert torch.equal(head.weight[C:], before[C:])
    assert (head.weight[:C] != before[:C]).any()


@pytest.mark.parametrize("make", [RowAdagrad, RowAdam])
def test_resizing_before_the_first_step_needs_no_state(make):
    head = sparse_head()
    optimizer = make(head.parameters())
    head.resize(C + 2, optimizer=optimizer)
    head_steps(head, optimizer)
