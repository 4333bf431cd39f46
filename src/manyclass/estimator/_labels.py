"""Labels, and the rows of a head that stand for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

Array = np.ndarray[Any, Any]

_NUMBER_KINDS, _STRING_KINDS = "biuf", "UTO"
_LARGEST_EXACT_INT = 2**53  # in float64


def check_one_label(y: Any, name: str) -> None:
    """Check that each row has one label.

    Raises:
        ValueError: y is a matrix, or a list of lists.
    """
    if sparse.issparse(y) or getattr(y, "ndim", 1) == 2:
        shape = y.shape
    elif isinstance(y, list | tuple) and any(isinstance(row, list | tuple | set) for row in y):
        shape = len(y), "several"
    else:
        return
    if shape[1] != 1 or sparse.issparse(y):
        raise ValueError(
            f"`{name}` must be a 1d array with one label for each row, got shape [{shape[0]}, {shape[1]}]. Repeat each "
            "row once for each of its labels: `rows, labels = Y.nonzero()` of an indicator matrix Y, and then "
            "`fit(X[rows], labels, sample_weight=1 / np.bincount(rows)[rows])`"
        )


def check_one_type(y: Any, name: str) -> None:
    """Check that labels are all strings, or none of them is: others neither compare nor sort.

    Raises:
        TypeError: a label is a string and another is not.
    """
    if not isinstance(y, list | tuple):
        # Only an array of objects can hold several types.
        if getattr(getattr(y, "dtype", None), "kind", "") != "O" or getattr(y, "ndim", 0) != 1:
            return
        y = np.asarray(y)
    for position, label in enumerate(y):
        if isinstance(label, str) != isinstance(y[0], str):
            raise TypeError(
                f"`{name}` must hold labels of one type, all strings or all numbers, got {y[0]!r} at position 0 and "
                f"{label!r} at position {position}"
            )


@dataclass(frozen=True)
class Labels:
    """C classes in ascending order, and their rows in a head, which has them in order of arrival.

    Args:
        classes: [C], ascending.
        rows: int64 [C], the head's row of each class. None: the same order.

    Example:
        >>> labels = Labels.of(np.array(["pear", "fig", "pear"])).joined(np.array(["kiwi"]), "y")
        >>> labels.classes.tolist(), labels.rows_of(np.array(["kiwi", "fig"]), "y").tolist()
        (['fig', 'kiwi', 'pear'], [2, 0])
    """

    classes: Array
    rows: Array | None = None

    @classmethod
    def of(cls, y: Array) -> "Labels":
        """Return the classes that occur in y [n]."""
        return cls(np.unique(y))

    def __len__(self) -> int:
        return len(self.classes)

    def joined(self, y: Array, name: str) -> "Labels":
        """Return labels with the new classes of y added; their rows follow the present ones.

        Raises:
            ValueError: the labels are of a type that does not compare with the present one, as strings with numbers.
        """
        self._check_type(y, name)
        fresh = np.unique(y)
        fresh = fresh[~self._known(fresh)[1]]
        if not len(fresh):
            return self
        rows = np.arange(len(self)) if self.rows is None else self.rows
        classes = np.concatenate([self.classes, fresh])
        order = np.argsort(classes, kind="stable")
        return Labels(classes[order], np.concatenate([rows, np.arange(len(rows), len(classes))])[order])

    def rows_of(self, y: Array, name: str) -> Array:
        """Return the rows, int64 [n], of labels [n].

        Raises:
            ValueError: a label is not among the classes.
        """
        self._check_type(y, name)
        place, known = self._known(y)
        if not known.all():
            first = int(np.flatnonzero(~known)[0])
            label = y[first : first + 1].tolist()[0]
            raise ValueError(
                f"`{name}` must hold classes that were seen in training, got {label!r} at position {first}"
            )
        return place if self.rows is None else self.rows[place]

    def of_rows(self, rows: Array) -> Array:
        """Return the labels of rows, of any shape."""
        return self.classes[rows if self.rows is None else self.places()[rows]]

    def places(self) -> Array:
        """Return int64 [C]: the position in ascending order of the class of each row."""
        if self.rows is None:
            return np.arange(len(self))
        places = np.empty_like(self.rows)
        places[self.rows] = np.arange(len(self))
        return places

    def _known(self, y: Array) -> tuple[Array, Array]:
        """Return the positions of labels among the classes, and whether they are there."""
        place = np.searchsorted(self.classes, y).astype(np.int64)
        known = self.classes[np.minimum(place, len(self) - 1)] == y
        return place, np.asarray(known, dtype=bool)

    def _check_type(self, y: Array, name: str) -> None:
        own, other = self.classes.dtype, y.dtype
        alike = own.kind == other.kind or any(
            {own.kind, other.kind} <= set(kinds) for kinds in (_NUMBER_KINDS, _STRING_KINDS)
        )
        # NumPy compares mixed types as floats, where large integers are no longer distinct.
        if {own.kind, other.kind} == {"i", "u"}:
            alike = np.result_type(own, other).kind != "f"
        elif {own.kind, other.kind} in ({"i", "f"}, {"u", "f"}):
            whole = self.classes if own.kind != "f" else y
            alike = not len(whole) or max(-int(whole.min()), int(whole.max())) <= _LARGEST_EXACT_INT
        elif alike and "O" in (own.kind, other.kind) and len(y):
            alike = isinstance(self.classes[0], str) == isinstance(y[0], str)
        if not alike:
            raise ValueError(f"`{name}` must hold labels of the same type as before, {own}, got {other}")
