"""Labels as text and as the ids of classes."""

from collections.abc import Iterable, Iterator
from typing import Any, overload

import numpy as np

LABEL_LIMIT = 1000  # characters


class Names:
    """The names of classes, numbered as they first appear.

    Args:
        names: those of the first ids, none twice.

    Raises:
        ValueError: one is there twice.

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
        """The id of a label. None: it has none."""
        return self._ids.get(label)

    def add(self, label: str) -> int:
        """The id of a label; one that is new gets the next."""
        i = self._ids.get(label)
        if i is None:
            i = self._ids[label] = len(self._names)
            self._names.append(label)
        return i

    def number(self, labels: Iterable[str]) -> "np.ndarray[Any, Any]":
        """The ids [L] of labels, int64; those that are new get the next ones."""
        return np.fromiter(map(self.add, labels), dtype=np.int64)

    def ranked(self, count: "np.ndarray[Any, Any]") -> tuple["Names", "np.ndarray[Any, Any]"]:
        """The same names from frequent to rare, by counts [C], and the new id [C] of each, int64.

        By name where they are as frequent, so that ids follow from the data alone and not from its order.

        Example:
            >>> names, rank = Names(["b", "c", "a"]).ranked(np.array([1, 5, 1]))
            >>> list(names), rank.tolist()
            (['c', 'a', 'b'], [2, 0, 1])
        """
        often = count.tolist()
        order = sorted(range(len(self)), key=lambda i: (-often[i], self._names[i]))
        rank = np.empty(len(self), dtype=np.int64)
        rank[order] = np.arange(len(self))
        return Names(self._names[i] for i in order), rank

    def find(self, labels: Iterable[str]) -> "np.ndarray[Any, Any]":
        """The ids [L] of labels, int64; -1 for those that have none."""
        return np.array([self._ids.get(label, -1) for label in labels], dtype=np.int64)


def label_fault(label: str) -> str | None:
    """What is wrong with a label, as the second half of a sentence; None: nothing.

    Example:
        >>> label_fault("cat"), label_fault("")
        (None, 'must have a label in each row, got an empty one')
    """
    if not label:
        return "must have a label in each row, got an empty one"
    if len(label) > LABEL_LIMIT:
        return f"must have labels of at most {LABEL_LIMIT:,} characters, got one of {len(label):,}"
    if not label.isascii() and any("\ud800" <= character <= "\udfff" for character in label):
        return f"must have labels of Unicode characters, got {label!r}"
    if "\0" in label:
        return "must have labels without NUL characters, got one with them"
    return None
