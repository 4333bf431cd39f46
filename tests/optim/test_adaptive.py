"""RowAdagrad and RowAdam if only some rows have a gradient."""

import pytest
import torch

from manyclass.optim import RowAdagrad, RowAdam
from tests.optim.tables import C, parameters, same, set_dense_gradients, set_gradients, sparse
from tests.optim.test_sgd import rows

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_adagrad_equals_torchs_for_any_rows_with_a_gradient(start, dtype):
    params, theirs = parameters(dtype), parameters(dtype)
    optimizer = RowAdagrad(params, 0.1, initial_accumulator_value=start)
    twin = torch.optim.Adagrad(theirs, 0.1, initial_accumulator_value=start)
    for step in range(20):
        set_gradients(params, rows(step), step)
        set_dense_gradients(theirs, rows(step), step)
        optimizer.step()
        twin.step()
        same(params, theirs)


def test_adagrad_by_row_divides_a_row_by_the_root_of_its_mean_squares():
    weight, bias = parameters()
    optimizer = RowAdagrad([weight, bias], 0.1, initial_accumulator_value=0.2, by_row=True)
    expected, totals = weight.detach().clone(), torch.full((C,), 0.2, dtype=torch.float64)
    for step in range(10):
        set_gradients([weight, bias], rows(step), step)
        gradient = weight.grad.to_dense()
        for c in rows(step).unique().tolist():
            totals[c] += sum(g**2 for g in gradient[c]) / len(gradient[c])
            expected[c] -= 0.1 * gradient[c] / (totals[c].sqrt() + 1e-10)
        optimizer.step()
    same([weight, optimizer.state[weight]["sum"]], [expected, totals])


def test_adagrad_by_row_equals_adagrad_if_a_row_is_one_number():
    (_, bias), (_, other) = parameters(), parameters()
    optimizers = RowAdagrad([bias], 0.1, by_row=True), RowAdagrad([other], 0.1)
    for step in range(5):
        for p, optimizer in zip((bias, other), optimizers, strict=True):
            set_gradients([p], rows(step), step)
            optimizer.step()
    assert torch.equal(bias, other)


def test_a_row_that_adam_updates_late_moves_by_one_learning_rate():
    (weight, _) = parameters()
    optimizer = RowAdam([weight], 0.01)
    for step in range(300):
        set_gradients([weight], torch.tensor([1, 2]), step)
        optimizer.step()
    before = weight.detach().clone()
    weight.grad = sparse(torch.tensor([7]), torch.tensor([[3.0, -0.2, 40.0]]), weight)
    optimizer.step()
    moved = torch.tensor([-0.01, 0.01, -0.01], dtype=torch.float64)
    torch.testing.assert_close((weight - before)[7].detach(), moved, rtol=1e-6, atol=0)
    assert optimizer.state[weight]["steps"][[1, 2, 7, 8]].tolist() == [300, 300, 1, 0]


def test_adam_counts_the_steps_of_each_row():
    (weight, _) = parameters()
    optimizer = RowAdam([weight], 0.1)
    alone = [torch.nn.Parameter(row.detach().clone()) for row in weight]
    twins = [torch.optim.Adam([row], 0.1) for row in alone]
    for step in range(25):
        set_gradients([weight], rows(step), step)
        gradient = weight.grad.to_dense()
        for c in rows(step).unique().tolist():
            alone[c].grad = gradient[c]
            twins[c].step()
        optimizer.step()
    same([weight], [torch.stack(alone)])
