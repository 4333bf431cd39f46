"""Labels as text and as class ids."""

from collections.abc import Iterable, Iterator
from typing import Any, overload

import numpy as np

MAX_LABEL_CHARACTERS = 1000


class Names:
    """Class names, numbered in order of first appearance.

    Args:
        names: names of the first ids.

    Raises:
        ValueError: a name occurs twice.

    Example:
        >>> names = Names()
        >>> names.number(["cat", "dog", "cat"]).tolist()
        [0, 1, 0]
        >>> len(names), names[1], names.ids("dog"), names.ids("cow")
        (2, 'dog', 1, None)
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = list(names)
        self._ids = {name: i for i, name in enumerate(self._names)}
        if len(self._ids) < len(self._names):
            again = next(name for i, name in enumerate(self._names) if self._ids[name] != i)
            raise ValueError(f"`names` must be different from each other, got {again!r} twice")

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        return self._names[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self._names == other._names

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Names({len(self)})"

    def ids(self, label: str) -> int | None:
        """Return the id of a label, or None if it is unknown."""
        return self._ids.get(label)

    def add(self, label: str) -> int:
        """Return the id of a label; a new label gets the next id."""
        i = self._ids.get(label)
        if i is None:
            i = self._ids[label] = len(self._names)
            self._names.append(label)
        return i

    def number(self, labels: Iterable[str]) -> "np.ndarray[Any, Any]":
        """Return the ids [L] of labels, int64; new labels get the next ids."""
        return np.fromiter(map(self.add, labels), dtype=np.int64)

    def ranked(self, count: "np.ndarray[Any, Any]") -> tuple["Names", "np.ndarray[Any, Any]"]:
        """Return the same names from frequent to rare, by counts [C], and the new id [C] of each, int64.

        Ties are ordered by name, so that ids do not depend on the order of the data.

        Example:
            >>> names, rank = Names(["b", "c", "a"]).ranked(np.array([1, 5, 1]))
            >>> list(names), rank.tolist()
            (['c', 'a', 'b'], [2, 0, 1])
        """
        counts = count.tolist()
        order = sorted(range(len(self)), key=lambda i: (-counts[i], self._names[i]))
        rank = np.empty(len(self), dtype=np.int64)
        rank[order] = np.arange(len(self))
        return Names(self._names[i] for i in order), rank

    def find(self, labels: Iterable[str]) -> "np.ndarray[Any, Any]":
        """Return the ids [L] of labels, int64; -1 for unknown labels."""
        return np.array([self._ids.get(label, -1) for label in labels], dtype=np.int64)


def label_fault(label: str) -> str | None:
    """Return the fault of a label as the second half of a sentence, or None.

    Example:
        >>> label_fault("cat"), label_fault("")
        (None, 'must have a label in each row, got an empty one')
    """
    if not label:
        return "must have a label in each row, got an empty one"
    if len(label) > MAX_LABEL_CHARACTERS:
        return f"must have labels of at most {MAX_LABEL_CHARACTERS:,} characters, got one of {len(label):,}"
    if not label.isascii() and any("\ud800" <= character <= "\udfff" for character in label):
        return f"must have labels of Unicode characters, got {label!r}"
    if "\0" in label:
        return "must have labels without NUL characters, got one with them"
    return None
