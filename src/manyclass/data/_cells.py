"""Some rows of a table, column by column."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Values = list[str] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Cells:
    """Some rows of a table.

    Args:
        places: where each row is in the file.
        columns: of each name, its cells: text, or float64 with NaN for what is missing.
        done: bytes of the file read so far.
    """

    places: Sequence[int]
    columns: dict[str, Values]
    done: int


class Table(Protocol):
    """A file with named columns.

    Attributes:
        path: of the file.
        unit: what places count: "line" or "row".
        columns: the names.
        kinds: of each name, "number", "text", or what it is where it makes no features; none where cells are all text
            and it is to be found out.
    """

    path: Path
    unit: str
    columns: tuple[str, ...]
    kinds: dict[str, str]

    def batches(self, columns: Sequence[str], *, label: str | None = None) -> Iterator[Cells]:
        """All rows, a few thousand at a time: these columns, and that of the labels, which is text."""
        ...
