"""Products over runs of steps equal the product of the single steps."""

import pytest
import torch

from manyclass.optim._history import append, empty, since


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 8, 63, 64, 65, 130, 200])
def test_the_product_since_any_step_is_that_of_the_steps(steps):
    torch.manual_seed(0)
    matrices = torch.eye(2, dtype=torch.float64) + 0.1 * torch.randn(steps, 2, 2, dtype=torch.float64)
    history = empty(torch.device("cpu"))
    for matrix in matrices:
        append(history, matrix.flatten().tolist())
    assert history["steps"] == steps
    assert len(history["runs"]) == steps.bit_count()
    expected = [torch.eye(2, dtype=torch.float64)]
    for matrix in matrices.flip(0):
        expected.append(expected[-1] @ matrix)
    products = since(history, torch.arange(steps + 1))
    torch.testing.assert_close(products, torch.stack(expected[::-1]), rtol=1e-12, atol=1e-12)


def test_it_takes_64_bytes_a_step_up_to_a_factor_of_two():
    history = empty(torch.device("cpu"))
    for _ in range(1000):
        append(history, [1.0, 0.0, 0.0, 1.0])
    assert history["table"].nbytes <= 2 * 64 * 1000
