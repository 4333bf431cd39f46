import pytest
import torch

from manyclass.training import fast_products


@pytest.fixture(autouse=True)
def _restored():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_products_of_a_gpu_are_in_tf32_until_the_end():
    with fast_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_error_restores_the_precision():
    with pytest.raises(KeyError), fast_products(torch.device("cuda", 1)):
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_other_devices_keep_their_precision():
    with fast_products(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_chosen_precision_is_kept():
    torch.set_float32_matmul_precision("medium")
    with fast_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "medium"
