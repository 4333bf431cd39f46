"""What users did, in the order of time: the next item is the class of those before it."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyclass import _check
from manyclass.data.files import Watch, lines, shown
from manyclass.data.names import Names, label_fault
from manyclass.data.rows import runs
from manyclass.defaults import IGNORE_INDEX
from manyclass.errors import UserError

Array = np.ndarray[Any, Any]

_FEWEST = 3  # items of a user of whom some are held out
# How many items at the end of a user are no input; the first of them is the target.
_LAST = {"valid": 2, "test": 1, "next": 0}


@dataclass(frozen=True)
class Sequences:
    """The items of each user in the order of time; ids of items go from frequent to rare.

    The last item of a user is to test on, the one before it to choose by, and all others to train on. Users of fewer
    than three items are there to train on alone.

    Args:
        items: int64 [N], all users' one after the other.
        starts: int64 [U + 1], where those of each begin.
        item_names, user_names: of each id.
        unknown: how many lines were left out, since a model that was asked for does not know their item.
        last_unknown: bool [U], whether that is so of the last line of each user: there is nothing to test on. None: of
            no user.

    Example:
        >>> names = Names("abcd"), Names(["u", "v"])
        >>> sequences = Sequences(torch.tensor([0, 1, 2, 3, 1]), torch.tensor([0, 4, 5]), *names)
        >>> [(inputs.tolist(), target.tolist()) for inputs, _, target, _ in sequences.last_batches("test", 8, length=9)]
        [([[0, 1, 2]], [3])]
    """

    items: Tensor
    starts: Tensor
    item_names: Names
    user_names: Names
    unknown: int = 0
    last_unknown: Tensor | None = None

    @property
    def num_items(self) -> int:
        return len(self.item_names)

    @property
    def num_users(self) -> int:
        return len(self.starts) - 1

    @property
    def train_ends(self) -> Tensor:
        """int64 [U]: where the items to train on end."""
        number = self.starts.diff()
        return self.starts[1:] - torch.where(number < _FEWEST, 0, 2)

    def counts(self) -> Tensor:
        """How often each item is there to train on, int64 [C]."""
        kept = torch.zeros(len(self.items) + 1, dtype=torch.int64)
        kept.index_add_(0, self.starts[:-1], torch.ones(self.num_users, dtype=torch.int64))
        kept.index_add_(0, self.train_ends, -torch.ones(self.num_users, dtype=torch.int64))
        return torch.bincount(self.items[kept.cumsum(0)[:-1] > 0], minlength=self.num_items)

    def last_batches(
        self, split: str, size: int, *, length: int, seen: bool = True, limit: int | None = None
    ) -> "LastBatches":
        """What comes after the items of each user, see `LastBatches`."""
        return LastBatches(self, split, size, length=length, seen=seen, limit=limit)


class SequenceBatches:
    """Batches `(inputs, target)` to train a recurrent encoder on: each item is the target of those before it.

    Users' items are cut into pieces of at most `length` steps, from the end on: a piece goes to where the next begins.
    Inputs int64 [B, T], T that of the longest; after the end of a piece inputs are 0 and targets −100, which no loss
    counts.

    Args:
        sequences: of all users.
        size: B.
        length: of a piece, at most.
        seed: of the orders, each epoch's its own. None: users in the order of their ids.

    Raises:
        ValueError: a size or length below 1.

    Example:
        >>> sequences = Sequences(torch.tensor([5, 3, 4, 3, 1]), torch.tensor([0, 5]), Names("abcdef"), Names("u"))
        >>> [(inputs.tolist(), target.tolist()) for inputs, target in SequenceBatches(sequences, 2, length=8)]
        [([[5, 3]], [[3, 4]])]
    """

    def __init__(self, sequences: Sequences, size: int, *, length: int, seed: int | None = None) -> None:
        self._items = sequences.items.numpy()
        self._size, self._seed, self._epoch = _check.whole("size", size, 1), seed, 0
        _check.whole("length", length, 1)
        first, last = sequences.starts[:-1].numpy(), sequences.train_ends.numpy() - 1
        steps = np.maximum(last - first, 0)
        pieces = -(-steps // length)
        # Pieces of a user from the last to the first.
        back = runs(np.zeros_like(pieces), pieces)
        self._end = np.repeat(last, pieces) - back * length
        self._begin = np.maximum(self._end - length, np.repeat(first, pieces))

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._end) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self._end)
        order = np.arange(n) if self._seed is None else np.random.default_rng([self._seed, self._epoch]).permutation(n)
        for first in range(0, n, self._size):
            chosen = order[first : first + self._size]
            begin, number = self._begin[chosen], self._end[chosen] - self._begin[chosen]
            yield _padded(self._items, begin, number, 0), _padded(self._items, begin + 1, number, IGNORE_INDEX)


class LastBatches:
    """Batches `(inputs, lengths, target, seen)` to rank all items by what a user did last.

    Inputs int64 [B, T]: the last `length` items before the target, then 0; lengths int64 [B]; target int64 [B]; seen
    int64 [B, E]: all items of the user before the target, but for the target, with −1 for none: those to leave out.

    Args:
        sequences: of all users.
        split: "valid": the target is the last item but one; "test": the last. Users of fewer than three items are left
            out. "next": what comes after all items of every user, the target is −100.
        size: B.
        length: T, at most.
        seen: whether to give what a user has; else E is 0. One of very many items makes a batch as wide as that.
        limit: how many users, at most, from everywhere among them. None: all.

    Attributes:
        users: int64, the users in the order of the batches.

    Raises:
        ValueError: a size or length below 1, or another split.
    """

    def __init__(
        self,
        sequences: Sequences,
        split: str,
        size: int,
        *,
        length: int,
        seen: bool = True,
        limit: int | None = None,
    ) -> None:
        _check.choice("split", split, tuple(_LAST))
        self._seen = seen
        self._items, self._split = sequences.items.numpy(), split
        self._size, self._length = _check.whole("size", size, 1), _check.whole("length", length, 1)
        starts = sequences.starts.numpy()
        number = np.diff(starts)
        users = np.flatnonzero(number >= (1 if split == "next" else _FEWEST))
        if split == "test" and sequences.last_unknown is not None:
            users = users[~sequences.last_unknown.numpy()[users]]
        if limit is not None:
            users = users[:: max(1, -(-len(users) // limit))]
        self.users = torch.from_numpy(users)
        self._begin, self._end = starts[users], starts[users + 1] - _LAST[split]

    def __len__(self) -> int:
        return -(-len(self._end) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for first in range(0, len(self._end), self._size):
            begin, end = self._begin[first : first + self._size], self._end[first : first + self._size]
            number = np.minimum(end - begin, self._length)
            inputs = _padded(self._items, end - number, number, 0)
            seen = _padded(self._items, begin, end - begin if self._seen else np.zeros_like(end), -1)
            asked = np.full(len(end), IGNORE_INDEX) if self._split == "next" else self._items[end]
            target = torch.from_numpy(asked)
            yield inputs, torch.from_numpy(number), target, seen.masked_fill_(seen == target[:, None], -1)


def read_sequences(
    path: Path, *, item_names: Names | None = None, name: str = "data", watch: Watch | None = None
) -> Sequences:
    """Read what users did, a line each: user and item, in the order of time, with a TAB or spaces between them.

    Blank lines are passed over, and spaces around a name.

    Args:
        path: a UTF-8 file; .gz, .xz and .bz2 are read as what they hold. Lines of a user need not stand together.
        item_names: of the items that a model knows; lines of others are left out, their users are not. None: those
            of the file.
        name: what the user knows the path as, for errors.
        watch: told how far it is read.

    Raises:
        UserError: the file cannot be read, has a line of another form, or fewer than two items.
    """
    users, items = Names(), Names() if item_names is None else item_names
    user_of, item_of = array("q"), array("q")
    unknown, last_unknown = 0, set[int]()
    for place, line in enumerate(lines(path, name=name, watch=watch), 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if len(fields) != 2 or not all(fields):
            raise UserError(
                f"`{name}` must hold user and item in each line, got {shown(line)} in line {place} of {path}"
            )
        if fault := next(filter(None, map(label_fault, fields)), None):
            raise UserError(f"`{name}` {fault} in line {place} of {path}")
        user = users.add(fields[0])
        known = items.add(fields[1]) if item_names is None else items.ids(fields[1])
        if known is None:
            unknown += 1
            last_unknown.add(user)
            continue
        last_unknown.discard(user)
        item_of.append(known)
        user_of.append(user)
    if not item_of:
        what = f"of {unknown:,} lines none has an item that the model knows" if unknown else "got none"
        raise UserError(f"`{name}` must hold lines of user and item, {what} in {path}")
    if len(items) < 2:
        raise UserError(f"`{name}` must have at least two items, got only {shown(items[0])} in {path}")
    owner, item = (np.frombuffer(ids, dtype=np.int64) for ids in (user_of, item_of))
    if item_names is None:
        items, rank = items.ranked(np.bincount(item, minlength=len(items)))
        item = rank[item]
    sequence = item[np.argsort(owner, kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(users)))])
    ends = torch.zeros(len(users), dtype=torch.bool)
    ends[list(last_unknown)] = True
    return Sequences(torch.from_numpy(sequence), torch.from_numpy(starts), items, users, unknown, ends)


def _padded(items: Array, begin: Array, number: Array, pad: int) -> Tensor:
    """Runs of items [B, T], T that of the longest run."""
    place = np.arange(number.max(initial=0))
    found = items[np.minimum(begin[:, None] + place, len(items) - 1)]
    return torch.from_numpy(np.where(place < number[:, None], found, pad))
