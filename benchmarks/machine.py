"""What a benchmark says of the machine it ran on, and how it times."""

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable

import torch


def provenance() -> dict[str, str]:
    """Columns that go with every row of results."""
    return {
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "huge_pages": str(int(huge_pages())),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def huge_pages() -> bool:
    """Whether torch asks for huge pages, which decide how random access to a large table scales."""
    return os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"


def peak_gib() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def alternate(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender, all of them in turn in each repeat: a machine's moods then hit all alike."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def quantiles(times: list[float]) -> tuple[float, float, float]:
    """p20, median, p80."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], statistics.median(times), cuts[7]
