"""Description of the machine, timing and CSV output, shared by all benchmarks."""

import csv
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def provenance() -> dict[str, str]:
    """Return the machine's columns, which every row of results has."""
    # Imported here, so that contenders without torch are timed, and their memory measured, without it.
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
    """Return the processor's model name."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def huge_pages() -> bool:
    """Return True if torch uses huge pages, which make random access to a large table scale better."""
    return os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"


def peak_gib() -> float:
    """Return the peak memory of this process."""
    try:
        # A new process inherits the peak that getrusage reports from its parent, so read /proc instead.
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def free_gib() -> float:
    """Return the memory available to new processes."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 2**20


def copy_gb_per_s(repeats: int = 20) -> float:
    """Measure GB/s read and written by a copy that fits into no cache."""
    import torch

    source, target = torch.ones(2**25), torch.ones(2**25)
    times = alternate({"copy": lambda: target.copy_(source)}, repeats)["copy"]
    return 2 * source.numel() * source.element_size() / statistics.median(times) / 1e9


def alternate(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time all contenders in turn in each repeat, so that changes of the machine's speed affect all alike."""
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
    """Return the 20 % quantile, the median and the 80 % quantile."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], statistics.median(times), cuts[7]


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows under the columns of the first one."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
