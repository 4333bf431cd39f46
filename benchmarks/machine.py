"""What a benchmark says of the machine it ran on, and how it times."""

import csv
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def provenance() -> dict[str, str]:
    """Columns that go with every row of results."""
    # Not above: contenders that do without torch are timed and weighed without it.
    import torch

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
    try:
        # Not what getrusage says: a new process inherits that from the one that started it.
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def free_gib() -> float:
    """Memory that processes could still take."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 2**20


def copy_gb_per_s(repeats: int = 20) -> float:
    """Bytes read and written a second by a copy that no cache holds."""
    import torch

    source, target = torch.ones(2**25), torch.ones(2**25)
    times = alternate({"copy": lambda: target.copy_(source)}, repeats)["copy"]
    return 2 * source.numel() * source.element_size() / statistics.median(times) / 1e9


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


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
