"""Numbers that stand for Python objects inside compiled graphs."""

import itertools
from typing import Any
from weakref import WeakValueDictionary

_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


class Handle:
    """The number of an object, which an opaque operator of a compiled graph can take as its argument.

    A copy or a pickle of the owner gets a handle of the copy. The owner is referred to weakly.
    """

    def __init__(self, owner: object) -> None:
        self.number = next(_numbers)
        _owners[self.number] = owner

    def __reduce__(self) -> tuple[object, ...]:
        return Handle, (_owners[self.number],)


def owner_of(number: int) -> Any:
    """Return the object with this number."""
    return _owners[number]
