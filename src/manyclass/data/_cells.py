"""Some rows of a table, by column."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Values = list[str] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class TableCells:
    """Some rows of a table.

    Args:
        places: the number of each row in the file.
        columns: the cells of each column: text, or float64 with NaN for missing ones.
        done: bytes of the file read so far.
    """

    places: Sequence[int]
    columns: dict[str, Values]
    done: int

    def first(self, number: int) -> "TableCells":
        """Return the first rows."""
        if number == len(self.places):
            return self
        return TableCells(
            self.places[:number], {name: values[:number] for name, values in self.columns.items()}, self.done
        )


class TableFile(Protocol):
    """A file with named columns.

    Attributes:
        path: path of the file.
        unit: the unit of places: "line" or "row".
        columns: names of the columns.
        types: type of each column: "number", "text", or another that makes no features. Empty if all cells are text
            and types must be inferred.
    """

    path: Path
    unit: str
    columns: tuple[str, ...]
    types: dict[str, str]

    def cells(self, columns: Sequence[str], *, label: str | None = None) -> Iterator[TableCells]:
        """Yield all rows, at most a few thousand at a time: these columns, and the label column as text.

        Raises:
            UserError: a row cannot be read; all rows before it have been yielded.
        """
        ...
