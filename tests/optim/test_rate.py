"""The learning rate may be a tensor, which schedules fill in place and steps on a GPU read without waiting."""

import copy
import io

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR

from manyclass.optim import RowAdagrad, RowAdam, RowSGD, _rate
from tests.optim.tables import C, identical, parameters, set_dense_gradients, set_gradients, sparse

MAKERS = {
    "RowSGD": RowSGD,
    "RowAdagrad": RowAdagrad,
    "RowAdagrad, by row": lambda p, lr, **options: RowAdagrad(p, lr, by_row=True, **options),
    "RowAdam": RowAdam,
}
ROWS = torch.tensor([2, 5, 2, 9])


def train(optimizer, params, steps=3, gradients=set_gradients, schedule=None):
    for step in range(steps):
        gradients(params, ROWS, step)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return params


@pytest.mark.parametrize("gradients", [set_gradients, set_dense_gradients])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_tensor_is_the_same_as_its_number(kernels, name, shape, gradients):
    found = []
    for lr in (0.25, torch.full(shape, 0.25)):
        params = parameters()
        found.append(train(MAKERS[name](params, lr), params, gradients=gradients))
    identical(*found)


@pytest.mark.parametrize("gradients", [set_gradients, set_dense_gradients])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_on_a_device_never_reads_the_tensor(name, shape, gradients, monkeypatch):
    expected = parameters()
    train(MAKERS[name](expected, 0.25, impl="eager"), expected, gradients=gradients)

    def fail(self, *_):
        raise AssertionError("a step read a tensor")

    params = parameters()
    optimizer = MAKERS[name](params, torch.full(shape, 0.25), impl="eager")
    with monkeypatch.context() as patch:
        patch.setattr(_rate, "is_on_host", lambda _: False)
        patch.setattr(torch.Tensor, "__float__", fail)
        patch.setattr(torch.Tensor, "item", fail)
        train(optimizer, params, gradients=gradients)
    torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_kernel_loads_the_tensor(name, shape, dtype, monkeypatch):
    pytest.importorskip("triton")
    found = []
    for lr in (0.25, torch.full(shape, 0.25, dtype=dtype)):
        params = parameters(torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(_rate, "is_on_host", lambda _: False)
            found.append(train(MAKERS[name](params, lr, impl="triton"), params))
    identical(*found)


@pytest.mark.parametrize(
    "make_schedule",
    [
        lambda o: CosineAnnealingLR(o, 5),
        lambda o: ExponentialLR(o, 0.5),
        lambda o: OneCycleLR(o, 0.5, total_steps=9, cycle_momentum=False),
    ],
    ids=["cosine", "exponential", "one cycle"],
)
@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_fills_the_tensor_in_place(name, make_schedule):
    found, rate = [], torch.tensor(0.5, dtype=torch.float64)
    for lr in (0.5, rate):
        params = parameters()
        optimizer = MAKERS[name](params, lr)
        found.append(train(optimizer, params, 4, schedule=make_schedule(optimizer)))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() != 0.5
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_groups_have_their_own_tensors(name):
    params, expected = parameters(), parameters()
    optimizer = MAKERS[name](params[:1], torch.tensor(0.5))
    optimizer.add_param_group({"params": params[1:], "lr": torch.tensor(0.125)})
    twin = MAKERS[name]([{"params": expected[:1]}, {"params": expected[1:], "lr": 0.125}], 0.5)
    identical(train(optimizer, params), train(twin, expected))


@pytest.mark.parametrize("name", MAKERS)
def test_a_tensor_survives_a_file_and_a_copy(name):
    params = parameters()
    optimizer = MAKERS[name](params, torch.tensor(0.5))
    train(optimizer, params)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = MAKERS[name](again, 0.1)
    restored.load_state_dict(torch.load(file, weights_only=True))
    copied_params, copied = copy.deepcopy((params, optimizer))
    for other in (restored, copied):
        assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.5))
        assert other.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]
    train(optimizer, params)
    identical(params, train(restored, again))
    identical(params, train(copied, copied_params))


REFUSED = {
    "negative": (torch.tensor(-0.5), ValueError, "`lr` must be finite and at least 0, got -0.5"),
    "NaN": (torch.tensor(torch.nan), ValueError, "`lr` must be finite and at least 0, got nan"),
    "two": (torch.ones(2), ValueError, r"`lr` must have one element, got a tensor of shape \[2\]"),
    "integer": (
        torch.tensor(1),
        TypeError,
        "`lr` must be a number or a floating-point tensor, got a tensor of torch.int64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", MAKERS)
def test_another_tensor_is_refused(name, case):
    lr, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        MAKERS[name](parameters(), lr)
    optimizer = MAKERS[name](parameters(), 0.1)
    with pytest.raises(kind, match=message):
        optimizer.add_param_group({"params": parameters(), "lr": lr})
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = lr
    with pytest.raises(kind, match=message):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", MAKERS)
def test_a_tensor_on_another_device_is_refused(name):
    params = parameters()
    optimizer = MAKERS[name](params, torch.tensor(0.1, device="meta"))
    set_gradients(params, ROWS, 0)
    with pytest.raises(ValueError, match="`lr` must be on cpu or the CPU, got a tensor on meta"):
        optimizer.step()


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.1}])
def test_missed_steps_need_a_number_or_a_tensor_on_the_cpu(options, monkeypatch):
    found = []
    for lr in (0.25, torch.tensor(0.25)):
        params = parameters()
        optimizer = RowSGD(params, lr, **options)
        train(optimizer, params)
        optimizer.catch_up()
        found.append(params)
    identical(*found)
    monkeypatch.setattr(_rate, "is_on_host", lambda _: False)
    with pytest.raises(ValueError, match="`lr` must be a number with momentum or weight decay, or on the CPU, got"):
        train(optimizer, params)


def test_a_tensor_of_a_huge_number_is_not_loaded():
    params = parameters()
    optimizer = RowSGD(params, 0.1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = torch.tensor(1e31)
    with pytest.raises(ValueError, match=r"`lr` must lie within ±1e\+30, got 9.99"):
        optimizer.load_state_dict(state)


def test_rows_without_a_gradient_stay():
    weight, _ = parameters()
    before = weight.detach().clone()
    weight.grad = sparse(torch.tensor([3]), torch.ones(1, weight.shape[1]), weight)
    RowSGD([weight], torch.tensor(0.5)).step()
    kept = torch.arange(C) != 3
    assert torch.equal(weight[kept], before[kept])
    assert not torch.equal(weight[3], before[3])
