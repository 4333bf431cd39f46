import time

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Problems this small spend most of their time waiting for threads on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Clock:
    """A clock that advances by a tick each time it is read, and by `sleep`."""

    def __init__(self):
        self.now, self.tick = 0.0, 2.0**-10

    def __call__(self):
        self.now += self.tick
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The clock that trainings measure their seconds by."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock
