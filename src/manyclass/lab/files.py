"""Files that are written in one piece: who reads one never sees half of it."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], common: Mapping[str, str]) -> None:
    """Rows under all the columns that any of them has, and columns that all have in common."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    beside = path.with_suffix(".tmp")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *common])
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
    os.replace(beside, path)
