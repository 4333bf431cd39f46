"""The time of work on a device."""

import time
from collections.abc import Callable

import torch

from manyclass._recording import present

HEAD_START_CYCLES = 40_000_000  # of a GPU, about 20 ms: the time in which Python launches a few steps
QUEUED_RUNS = 3


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of some work.

    In a step that will be replayed they are those of the device alone, since a replay launches no kernels from Python;
    else they are those until the device has finished.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    torch.cuda.synchronize(device)
    if present() is None:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device waits until the runs are in its queue.
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    for _ in range(QUEUED_RUNS):
        work()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / QUEUED_RUNS
