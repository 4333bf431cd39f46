"""Row updates by Triton's kernels equal those by torch's operators; rounding at random keeps the mean."""

import copy
import math

import pytest
import torch
from torch import nn

from manyclass.optim import RowAdagrad, RowAdam, RowSGD
from manyclass.optim._rounding import round_at_random

OPTIMISERS = {
    "RowSGD": lambda p, **options: RowSGD(p, 0.1, **options),
    "RowSGD, momentum": lambda p, **options: RowSGD(p, 0.1, momentum=0.9, **options),
    "RowAdagrad": lambda p, **options: RowAdagrad(p, 0.1, **options),
    "RowAdagrad, by row": lambda p, **options: RowAdagrad(p, 0.1, by_row=True, **options),
    "RowAdam": lambda p, **options: RowAdam(p, 0.1, **options),
}
C = 40
HALF_ULP = 2**-8  # of bfloat16, at 1


def parameters(dim):
    generator = torch.Generator().manual_seed(0)
    shapes = ((C, dim), (C,))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step):
    """Rows repeat, one of them more often than a kernel reads at once."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.cat([torch.randint(C // 2, (30,), generator=generator), torch.full((37,), 3)])
    for parameter in params:
        rows = torch.randn(len(ids), *parameter.shape[1:], generator=generator)
        parameter.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), rows, parameter.shape, check_invariants=False)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dim", [1, 7, 600])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_update_by_a_kernel_is_the_eager_one(name, dim):
    pytest.importorskip("triton")
    found = []
    for impl in ("eager", "triton"):
        params = parameters(dim)
        optimizer = OPTIMISERS[name](params, impl=impl)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        found.append([p.detach() for p in params])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    untouched = parameters(dim)
    for now, before in zip(found[1], untouched, strict=True):
        assert torch.equal(now[C // 2 :], before.detach()[C // 2 :])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", OPTIMISERS)
def test_dense_and_empty_gradients_need_no_kernel(name):
    pytest.importorskip("triton")
    found = []
    for impl in ("eager", "triton"):
        params = parameters(5)
        optimizer = OPTIMISERS[name](params, impl=impl)
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in params:
            empty = torch.empty(0, *parameter.shape[1:])
            none = torch.empty(1, 0, dtype=torch.int64)
            parameter.grad = torch.sparse_coo_tensor(none, empty, parameter.shape, check_invariants=False)
        optimizer.step()
        found.append([p.detach() for p in params])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_kernels_are_refused_by_name():
    params = parameters(5)
    optimizer = RowAdagrad(params, 0.1, impl="triton")
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="`impl` must be 'auto' or 'eager' on cpu"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_options_are_checked(name):
    with pytest.raises(ValueError, match="`impl` must be one of 'auto', 'eager', 'triton', got 'fast'"):
        OPTIMISERS[name](parameters(3), impl="fast")
    with pytest.raises(TypeError, match="`stochastic_rounding` must be True or False, got 1"):
        OPTIMISERS[name](parameters(3), stochastic_rounding=1)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_state_without_these_options_is_loaded(name):
    params = parameters(3)
    optimizer = OPTIMISERS[name](params)
    set_gradients(params, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["impl"], group["stochastic_rounding"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["impl"] == "auto"
    set_gradients(params, 1)
    optimizer.step()
    copy.deepcopy(optimizer).step()


def test_rounding_at_random_keeps_the_mean():
    torch.manual_seed(0)
    n = 200_000
    for x in (1 + 2**-10, -1 - 2**-10, 3.3e-5, -7.1e20):
        found = round_at_random(torch.full((n,), x)).double()
        assert len(found.unique()) == 2
        x = torch.tensor(x).double()  # the float32 number
        assert (found.mean() - x).abs() <= 4.5 * found.std() / math.sqrt(n)


def test_numbers_of_bfloat16_infinities_and_nan_stay():
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(round_at_random(exact).float(), exact)
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert torch.equal(round_at_random(special)[[0, 1, 3, 4]].float(), special[[0, 1, 3, 4]])
    assert round_at_random(special)[2].isnan()


@pytest.mark.parametrize("name", ["RowSGD", "RowAdagrad", "RowAdam"])
def test_updates_far_below_a_unit_in_the_last_place_count_on_average(name):
    """Without it, a row in bfloat16 does not move at all."""
    torch.manual_seed(0)
    moved = {}
    for rounding in (False, True):
        parameter = nn.Parameter(torch.ones(C, 500, dtype=torch.bfloat16))
        optimizer = OPTIMISERS[name]([parameter], stochastic_rounding=rounding)
        optimizer.param_groups[0]["lr"] = HALF_ULP / 50
        for _ in range(20):
            parameter.grad = torch.ones_like(parameter).to_sparse(1)
            optimizer.step()
        moved[rounding] = 1 - parameter.double().mean().item()
    twin = nn.Parameter(torch.ones(1, 1))
    optimizer = OPTIMISERS[name]([twin])
    optimizer.param_groups[0]["lr"] = HALF_ULP / 50
    for _ in range(20):
        twin.grad = torch.ones_like(twin)
        optimizer.step()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(1 - twin.item(), rel=0.1)


def test_two_steps_round_differently():
    torch.manual_seed(0)
    x = torch.full((1000,), 1 + 2**-9)
    assert not torch.equal(round_at_random(x), round_at_random(x))


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_rounds_as_torch_does_with_the_same_noise(monkeypatch):
    pytest.importorskip("triton")
    from tests.optim.rounding_kernel import round_all

    x = torch.cat([torch.randn(1000), torch.tensor([math.inf, -math.inf, 1.0, 0.0] * 6)])
    noise, out = torch.randint(1 << 16, x.shape, dtype=torch.int32), torch.empty_like(x)
    round_all[(1,)](x, noise, out, N=1024)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: noise)
    assert torch.equal(out, round_at_random(x).float())


@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_optimiser_pickled_without_these_options_takes_another_group(name):
    optimizer = OPTIMISERS[name](parameters(3))
    state = optimizer.__getstate__()
    for options in (state["defaults"], *state["param_groups"]):
        del options["impl"], options["stochastic_rounding"]
    optimizer.__setstate__(state)
    more = parameters(3)
    optimizer.add_param_group({"params": more})
    set_gradients(more, 0)
    optimizer.step()


def test_missed_steps_are_rounded_at_random_too():
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.ones(C, 500, dtype=torch.bfloat16))
    optimizer = RowSGD([parameter], 0.01, weight_decay=0.01, stochastic_rounding=True)
    for _ in range(10):
        rows = torch.zeros(1, 500, dtype=torch.bfloat16)
        parameter.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), rows, parameter.shape, check_invariants=False)
        optimizer.step()
        optimizer.catch_up()
    assert parameter.double()[1:].mean().item() == pytest.approx(0.9999**10, abs=1e-4)
