"""Whether a number for each class of each row is too much to hold."""

import os
from pathlib import Path

MOST = 1 << 31  # numbers
_SHARE = 0.25


def check_fits(num_rows: int, num_classes: int) -> None:
    """Raise where float64 numbers [n, C] are more than 2³¹, or than a quarter of the memory that is free.

    Raises:
        ValueError: they are; it says how many rows would do, and what does without.
    """
    most = MOST // num_classes
    if (free := available()) is not None:
        most = min(most, int(free * _SHARE) // (8 * num_classes))
    if num_rows <= most:
        return
    size = num_rows * num_classes * 8 / 2**30
    some = f"or at most {most:,} rows at a time" if most else "which need no more than the classes they name"
    raise ValueError(
        f"`X` must have at most {most:,} rows where each of {num_classes:,} classes is asked for, got {num_rows:,}: "
        f"{num_rows:,} × {num_classes:,} numbers take {size:,.1f} GiB. Use predict_top(X, k) or "
        f"log_prob_of(X, labels), {some}"
    )


def available() -> int | None:
    """Bytes of memory that are free; None where the system does not say."""
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
