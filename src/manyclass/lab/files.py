"""Text and CSV files, written with an atomic rename so that a reader never sees half of one."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], common: Mapping[str, str]) -> None:
    """Write rows atomically, with a column for every key of any row and the `common` columns added to each."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *common])
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
    os.replace(beside, path)
