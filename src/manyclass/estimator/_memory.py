"""The memory for a number per row and class."""

import os
from pathlib import Path

MOST_NUMBERS = 1 << 31
_SHARE_OF_FREE_MEMORY = 0.25


def check_fits(num_rows: int, num_classes: int) -> None:
    """Check that float64 numbers [n, C] are at most 2³¹ and take at most a quarter of the free memory.

    Raises:
        ValueError: they do not; the message says how many rows fit, and names methods that need less memory.
    """
    most = MOST_NUMBERS // num_classes
    if (free := available()) is not None:
        most = min(most, int(free * _SHARE_OF_FREE_MEMORY) // (8 * num_classes))
    if num_rows <= most:
        return
    size = num_rows * num_classes * 8 / 2**30
    some = f"or at most {most:,} rows at a time" if most else "which need no more than the classes they name"
    raise ValueError(
        f"`X` must have at most {most:,} rows to return each of {num_classes:,} classes, got {num_rows:,}: "
        f"{num_rows:,} × {num_classes:,} numbers take {size:,.1f} GiB. Use predict_top(X, k) or "
        f"log_prob_of(X, labels), {some}"
    )


def available() -> int | None:
    """Return the bytes of free memory; None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
