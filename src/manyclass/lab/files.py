"""Files that are written in one piece: who reads one never sees half of it."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyclass.storage import atomic_write


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], common: Mapping[str, str]) -> None:
    """Rows under all the columns that any of them has, and columns that all have in common."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *common])
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
