"""A state dict that is not of such an optimiser is refused when it is loaded, and changes nothing."""

import copy

import pytest
import torch

from tests.optim.tables import OURS, C, D, identical, parameters, set_gradients
from tests.optim.test_sgd import rows


def trained(name):
    params = parameters(torch.float32)
    optimizer = OURS[name](params)
    for step in range(9):
        set_gradients(params, rows(step), step)
        optimizer.step()
    return params, optimizer


def set_in(path, value):
    def change(state):
        *keys, last = path
        for key in keys:
            state = state[key]
        state[last] = value(state[last]) if callable(value) else value

    return change


def without(*path):
    def change(state):
        *keys, last = path
        for key in keys:
            state = state[key]
        del state[last]

    return change


def own(name, value):
    """Change an entry of the state of the weight."""
    return set_in(("state", 0, name), value)


def option(name, value):
    return set_in(("param_groups", 0, name), value)


SHAPE = rf"must have shape \[{C}, {D}\]"
REFUSED = [
    ("RowAdagrad", own("sum", lambda x: x[:-1]), SHAPE),
    ("RowAdagrad", own("sum", lambda x: x.T), SHAPE),
    ("RowAdagrad", own("sum", lambda x: x[:0]), SHAPE),
    ("RowAdagrad", own("sum", lambda x: x.long()), "dtype floating point"),
    ("RowAdagrad", own("sum", None), "`sum` must be a Tensor"),
    ("RowAdagrad, by row", own("sum", lambda x: x[:2]), rf"must have shape \[{C}, {D}\] or \[{C}\]"),
    ("RowAdagrad", option("lr", float("nan")), "`lr` must be finite"),
    ("RowAdagrad", option("eps", -1.0), "`eps` must be finite and at least 0"),
    ("RowAdagrad", option("lr", 10**400), "`lr` must be finite"),
    ("RowAdagrad", option("by_row", "yes"), "`by_row` must be True or False"),
    ("RowAdam", own("exp_avg", lambda x: x[:1]), SHAPE),
    ("RowAdam", own("exp_avg_sq", lambda x: x.unsqueeze(0)), SHAPE),
    ("RowAdam", own("steps", lambda x: x[:-1]), rf"must have shape \[{C}\]"),
    ("RowAdam", own("steps", lambda x: x.double()), r"dtype torch\.float32"),
    ("RowAdam", own("steps", lambda x: x - 100), "`steps` must be finite and not negative, got -"),
    ("RowAdam", own("steps", lambda x: x / 0 * 0), "`steps` must be finite and not negative, got nan"),
    ("RowAdam", without("state", 0, "exp_avg"), "the state of a parameter must have 'exp_avg'"),
    ("RowAdam", option("betas", 0.9), "`betas` must be two numbers, got 0.9"),
    ("RowSGD, momentum", own("momentum_buffer", lambda x: x[1:]), SHAPE),
    ("RowSGD, momentum", own("last", lambda x: x + 100), r"`last` must lie in \[0, 9\], got 10"),
    ("RowSGD, momentum", own("last", lambda x: -x - 1), r"`last` must lie in \[0, 9\], got -"),
    ("RowSGD, momentum", own("last", lambda x: x.float()), r"dtype torch\.int64"),
    ("RowSGD, momentum", without("state", 0, "last"), "the state of a parameter must have 'last', 'history'"),
    ("RowSGD, momentum", own("history", None), "`history` must have steps, runs and a table"),
    ("RowSGD, momentum", set_in(("state", 0, "history", "steps"), -1), "`history` must have as many steps"),
    ("RowSGD, momentum", set_in(("state", 0, "history", "steps"), 10**18), "`history` must have as many steps"),
    ("RowSGD, momentum", set_in(("state", 0, "history", "steps"), 8), "a matrix for each bit of its 8 steps"),
    ("RowSGD, momentum", set_in(("state", 0, "history", "table"), lambda x: x[:1]), "at most, got 9"),
    ("RowSGD, momentum", set_in(("state", 0, "history", "table"), lambda x: x[0]), r"matrices \[N, 2, 2\]"),
    ("RowSGD, momentum", set_in(("state", 0, "history", "runs", 0), [float("inf")] * 4), "a matrix for each bit"),
    ("RowSGD, momentum", option("momentum", 1.5), r"`momentum` must lie in \[0, 1\)"),
    ("RowSGD", without("param_groups", 0, "lr"), "must have the option 'lr' in each group"),
    ("RowSGD", option("params", [0]), r"must have groups of \[2\] parameters"),
    ("RowSGD", option("params", [0, 0]), "must number each parameter once"),
    ("RowSGD", set_in(("state",), None), "must have `state` and `param_groups`"),
    ("RowAdam", set_in(("state",), lambda x: {**x, 7: {}}), "hold state of these alone"),
    ("RowAdam", set_in(("state", 0), [1]), "must hold a dict for each parameter, got list"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_a_state_of_another_form_is_refused_before_anything_is_loaded(name, change, message):
    params, optimizer = trained(name)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    change(state)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.load_state_dict(state)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = OURS[name](again)
    other.load_state_dict(before)
    for p, o in ((params, optimizer), (again, other)):
        set_gradients(p, rows(9), 9)
        o.step()
    identical(params, again)


@pytest.mark.parametrize("state", [None, [], "x", {"state": {}}])
def test_an_object_that_is_no_state_dict_is_refused(state):
    with pytest.raises(ValueError, match="must have `state` and `param_groups`"):
        OURS["RowAdam"](parameters()).load_state_dict(state)


@pytest.mark.parametrize(("name", "option_name"), [("RowSGD, both", "lr"), ("RowAdagrad", "initial_accumulator_value")])
def test_options_may_be_ints_of_more_than_64_bits(name, option_name):
    params, optimizer = trained(name)
    state = copy.deepcopy(optimizer.state_dict())
    option(option_name, 10**30)(state)
    optimizer.load_state_dict(state)
    set_gradients(params, rows(9), 9)
    optimizer.step()
    params[0].data = torch.cat([params[0].data, torch.ones(2, D)])
    optimizer.resize_rows(params[0], C)
