"""Chained optimisers are one torch optimiser, and each of them steps as if it were alone."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from manyclass import ClassHead, HierarchicalHead, ScorerHead
from manyclass.optim import Chained, RowAdagrad, RowAdam, RowSGD, clip_grad_norm_, for_model
from manyclass.parallel import load_checkpoint, save_checkpoint
from manyclass.samplers import Systematic
from tests.optim.tables import OURS, identical, parameters, set_dense_gradients, set_gradients

IDS = torch.tensor([3, 1, 3, 7])


def pair(name, seed=0):
    """Return rows with a row optimiser, dense parameters with AdamW, and the two optimisers."""
    rows, dense = parameters(seed=seed), parameters(seed=seed + 1)
    return rows, dense, OURS[name](rows), torch.optim.AdamW(dense, 0.01)


def gradients(rows, dense, step):
    set_gradients(rows, IDS + step % 3, step)
    set_dense_gradients(dense, IDS, step + 100)


@pytest.mark.parametrize("name", OURS)
def test_each_optimiser_steps_bit_for_bit_as_it_does_alone_under_a_schedule(name):
    rows, dense, *alone = pair(name)
    other_rows, other_dense, *children = pair(name)
    chained = Chained(*children)
    schedules = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in (*alone, chained)]
    for step in range(6):
        gradients(rows, dense, step)
        gradients(other_rows, other_dense, step)
        for optimizer in (*alone, chained):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    identical([*rows, *dense], [*other_rows, *other_dense])


@pytest.mark.parametrize("name", OURS)
def test_a_loaded_state_goes_on_bit_for_bit_also_from_a_file(name, tmp_path):
    rows, dense, *children = pair(name)
    chained = Chained(*children)
    for step in range(3):
        gradients(rows, dense, step)
        chained.step()
    torch.save(chained.state_dict(), tmp_path / "optimizer.pt")
    new_rows, new_dense, *children = pair(name, seed=5)
    restored = Chained(*children)
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    with torch.no_grad():
        for old, new in zip([*rows, *dense], [*new_rows, *new_dense], strict=True):
            new.copy_(old)
    for step in range(3, 6):
        gradients(rows, dense, step)
        gradients(new_rows, new_dense, step)
        chained.step()
        restored.step()
    identical([*rows, *dense], [*new_rows, *new_dense])


def broken_states():
    """Return by name functions that damage the state of a chain of RowAdam, AdamW and a chain of RowAdagrad."""

    def shorter_group(state):
        state["1 AdamW"]["param_groups"][0]["params"].pop()

    def other_shape(state):
        inner = state["2 Chained"]["0 RowAdagrad"]["state"]
        inner[0]["sum"] = inner[0]["sum"][:-1]

    def no_groups(state):
        del state["1 AdamW"]["param_groups"]

    def no_step(state):
        # torch has replaced the state when it finds out.
        del state["1 AdamW"]["state"][0]["step"]

    def no_child(state):
        del state["2 Chained"]

    def nothing(state):
        state["2 Chained"] = None

    def negative_rate(state):
        state["2 Chained"]["0 RowAdagrad"]["param_groups"][0]["lr"] = -1.0

    return {
        found.__name__: found
        for found in (shorter_group, other_shape, no_groups, no_step, no_child, nothing, negative_rate)
    }


@pytest.mark.parametrize("name", broken_states())
def test_a_state_that_one_of_them_refuses_changes_none(name):
    def chain(seed):
        tables = [parameters(seed=seed + i) for i in range(3)]
        inner = Chained(RowAdagrad(tables[2], 0.1))
        return tables, Chained(RowAdam(tables[0], 0.1), torch.optim.AdamW(tables[1], 0.01), inner)

    def step(tables, chained, seed):
        for i, table in enumerate(tables):
            (set_dense_gradients if i == 1 else set_gradients)(table, IDS, seed + i)
        chained.step()

    (tables, chained), (expected, untouched), (others, saved) = chain(0), chain(0), chain(50)
    for one, optimizer in ((tables, chained), (expected, untouched), (others, saved)):
        for seed in (10, 20):
            step(one, optimizer, seed)
    saved.param_groups[0]["lr"] = saved.param_groups[1]["lr"] = 0.7
    broken = copy.deepcopy(saved.state_dict())
    broken_states()[name](broken)
    groups = chained.param_groups
    state = {parameter: dict(value) for parameter, value in chained.state.items()}
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        chained.load_state_dict(broken)
    # The very groups and tensors, which schedules and others may hold.
    assert all(one is other for one, other in zip(groups, chained.param_groups, strict=True))
    assert chained.state.keys() == state.keys()
    for parameter, value in state.items():
        assert chained.state[parameter].keys() == value.keys()
        assert all(chained.state[parameter][key] is found for key, found in value.items())
    step(tables, chained, 30)
    step(expected, untouched, 30)
    for one, other in zip(tables, expected, strict=True):
        identical(one, other)
    # The state is refused for its damage alone.
    chained.load_state_dict(saved.state_dict())
    assert chained.param_groups[0]["lr"] == 0.7


def test_groups_and_state_are_those_of_the_children():
    rows, dense, first, second = pair("RowAdagrad")
    chained = Chained(first, second)
    assert chained.param_groups[0] is first.param_groups[0]
    assert chained.param_groups[1] is second.param_groups[0]
    assert not chained.state
    gradients(rows, dense, 0)
    chained.step()
    assert len(chained.state) == 4
    assert chained.state[rows[0]] is first.state[rows[0]]
    assert set(map(id, chained.state)) == set(map(id, [*rows, *dense]))
    # As trainers move the state to a device.
    for parameter, state in chained.state.items():
        chained.state[parameter] = copy.copy(state)
    assert "exp_avg" in second.state[dense[0]]
    assert "sum" in first.state[rows[0]]
    del chained.state[dense[1]]
    assert dense[1] not in second.state
    with pytest.raises(KeyError):
        chained.state[nn.Parameter(torch.ones(1))]


def test_groups_are_still_those_of_the_children_after_loading():
    _, _, *children = pair("RowAdam")
    chained = Chained(*children)
    chained.load_state_dict(copy.deepcopy(chained.state_dict()))
    chained.param_groups[1]["lr"] = 0.5
    assert children[1].param_groups[0]["lr"] == 0.5


def test_a_closure_is_called_once():
    rows, dense, *children = pair("RowSGD")
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(None)
        gradients(rows, dense, 0)
        return 3.5

    assert Chained(*children).step(closure) == 3.5
    assert len(calls) == 1


def test_zero_grad_reaches_all_parameters():
    rows, dense, *children = pair("RowSGD")
    chained = Chained(*children)
    gradients(rows, dense, 0)
    chained.zero_grad()
    assert all(parameter.grad is None for parameter in [*rows, *dense])


@pytest.mark.parametrize("broken", [False, True])
def test_a_grad_scaler_scales_and_skips_all_of_them(broken):
    rows, dense, *children = pair("RowAdagrad")
    expected_rows, expected_dense, *alone = pair("RowAdagrad")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    chained = Chained(*children)
    gradients(rows, dense, 0)
    gradients(expected_rows, expected_dense, 0)
    scaler.scale(torch.ones(()))
    with torch.no_grad():
        for parameter in [*rows, *dense]:
            parameter.grad = parameter.grad * 8.0
    if broken:
        # An overflow in one part must stop the others too.
        dense[0].grad[0, 0] = math.inf
    else:
        for optimizer in alone:
            optimizer.step()
    scaler.unscale_(chained)
    scaler.step(chained)
    scaler.update()
    identical([*rows, *dense], [*expected_rows, *expected_dense])


def test_a_schedule_of_momentum_is_refused_by_torch_in_its_words():
    _, _, *children = pair("RowSGD")
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(Chained(*children), 0.1, total_steps=10)
    assert OneCycleLR(Chained(*children), 0.1, total_steps=10, cycle_momentum=False).get_last_lr()[0] > 0


def test_copies_and_pickles_step_alike():
    rows, dense, *children = pair("RowAdam")
    chained = Chained(*children)
    gradients(rows, dense, 0)
    chained.step()
    for other in (copy.deepcopy(chained), pickle.loads(pickle.dumps(chained))):
        before = [p.detach().clone() for group in other.param_groups for p in group["params"]]
        identical(before, [*rows, *dense])
        for p in (p for group in other.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        other.step()
        for old, new in zip(before, (p for group in other.param_groups for p in group["params"]), strict=True):
            assert not torch.equal(old, new)
        identical(before, [*rows, *dense])


def test_updates_that_are_put_off_are_applied():
    rows, dense, expected_rows, _ = parameters(), parameters(seed=1), parameters(), None
    chained = Chained(RowSGD(rows, 0.1, momentum=0.9), torch.optim.AdamW(dense))
    alone = RowSGD(expected_rows, 0.1, momentum=0.9)
    for step in range(3):
        set_gradients(rows, IDS + step, step)
        set_gradients(expected_rows, IDS + step, step)
        chained.step()
        alone.step()
    before = rows[0].detach().clone()
    chained.catch_up()
    alone.catch_up()
    assert not torch.equal(before, rows[0])
    identical(rows, expected_rows)


def test_a_head_is_resized_with_the_state_of_its_rows():
    head, layer = ClassHead(4, 30, sampler=Systematic(torch.ones(30), 8), sparse=True), nn.Linear(4, 4)
    chained = for_model(nn.ModuleList([head, layer]))
    head(layer(torch.randn(5, 4)), torch.arange(5)).backward()
    chained.step()
    before = chained.state[head.weight]["sum"].clone()
    head.resize(33, sampler=Systematic(torch.ones(33), 8), optimizer=chained)
    found = chained.state[head.weight]["sum"]
    assert found.shape == (33, 4)
    assert torch.equal(found[:30], before)
    assert not found[30:].any()
    assert chained.state[layer.weight]["exp_avg"].shape == (4, 4)


def test_distributed_checkpoints_hold_each_of_them(tmp_path):
    rows, dense, *children = pair("RowAdagrad")
    chained = Chained(*children)
    gradients(rows, dense, 0)
    chained.step()
    save_checkpoint(tmp_path / "newest", {"optimizer": chained})
    _, _, *others = pair("RowAdagrad", seed=9)
    restored = Chained(*others)
    load_checkpoint(tmp_path / "newest", {"optimizer": restored})
    for one, other in zip(chained.state.values(), restored.state.values(), strict=True):
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


def test_clipping_takes_all_of_them():
    rows, dense, *children = pair("RowAdagrad")
    chained = Chained(*children)
    gradients(rows, dense, 0)
    every = [p for group in chained.param_groups for p in group["params"]]
    assert clip_grad_norm_(every, 0.01) > 0.01
    assert torch.nn.utils.clip_grad_norm_(every, 1.0).item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p, q: Chained(), ValueError, "`optimizers` must hold an optimiser, got none"),
        (lambda p, q: Chained([p]), TypeError, "`optimizers` must be torch optimisers, got a list"),
        (
            lambda p, q: Chained(torch.optim.LBFGS(p)),
            TypeError,
            "`optimizers` must step without a closure, got a LBFGS",
        ),
        (
            lambda p, q: Chained(RowSGD(p, 0.1), torch.optim.AdamW([*q, p[1]])),
            ValueError,
            r"`optimizers` must not share a parameter, got one of shape \[11\] in '0 RowSGD' and '1 AdamW'",
        ),
        (
            lambda p, q: Chained(RowSGD(p, 0.1)).add_param_group({"params": q}),
            ValueError,
            "`param_group` must be added to one of `optimizers`",
        ),
        (
            lambda p, q: Chained(RowSGD(p, 0.1)).load_state_dict(Chained(RowAdam(p, 0.1)).state_dict()),
            ValueError,
            r"`state_dict` must be that of \['0 RowSGD'\], got \['0 RowAdam'\]",
        ),
        (
            lambda p, q: Chained(RowSGD(p, 0.1)).load_state_dict([]),
            ValueError,
            r"`state_dict` must be that of \['0 RowSGD'\], got list",
        ),
        (
            lambda p, q: setattr(Chained(RowSGD(p, 0.1)), "param_groups", [{"params": q}]),
            AttributeError,
            "`param_groups` must be set on one of `optimizers`",
        ),
        (lambda p, q: for_model(nn.ReLU()), ValueError, "`model` must have a parameter that needs a gradient"),
    ],
)
def test_what_cannot_be_chained_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make(parameters(), parameters(seed=1))


class Model(nn.Module):
    """Every kind of table beside parameters that are none."""

    def __init__(self):
        super().__init__()
        self.dense, self.sparse = nn.Embedding(20, 4), nn.Embedding(20, 4, sparse=True)
        self.bags, self.tied = nn.EmbeddingBag(20, 4, sparse=True), nn.Embedding(30, 4)
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.head = ClassHead.tied(self.tied, sampler=Systematic(torch.ones(30), 8))
        self.tree = HierarchicalHead(4, 30, counts=torch.ones(30), sparse=True)
        self.scorer = ScorerHead(nn.Bilinear(4, 4, 1), Systematic(torch.ones(30), 8))


def test_a_model_is_split_into_rows_and_the_rest():
    model = Model()
    chained = for_model(model, rows=partial(RowAdagrad, lr=0.3), rest=partial(torch.optim.SGD, lr=0.2))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, second = ({names[id(p)] for p in group["params"]} for group in chained.param_groups)
    assert [type(optimizer).__name__ for optimizer in chained.optimizers] == ["RowAdagrad", "SGD"]
    trees = {name for name in names.values() if name.startswith("tree.")}
    assert first == {"sparse.weight", "bags.weight", "tied.weight", "head.bias"} | trees
    assert second == {"dense.weight", "layer.weight", "layer.bias", "scorer.scorer.weight", "scorer.scorer.bias"}


def test_a_model_without_tables_has_one_optimiser():
    (only,) = for_model(nn.Linear(2, 2)).optimizers
    assert isinstance(only, torch.optim.AdamW)
