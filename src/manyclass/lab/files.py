"""Text and CSV files, written with an atomic rename so that a reader never sees half of one."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyclass.storage import atomic_write


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], common: Mapping[str, str]) -> None:
    """Write rows atomically, with a column for every key of any row and the `common` columns added to each."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *common])
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
