import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """So small a problem waits for its threads most of the time, where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
