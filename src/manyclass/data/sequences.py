"""Interactions of users in the order of time: the next item is the class to predict from the earlier ones."""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyclass import _check
from manyclass.data.files import ReadProgress, lines, shown
from manyclass.data.names import Names, label_fault
from manyclass.data.rows import runs
from manyclass.data.share import WHOLE, Share
from manyclass.defaults import IGNORE_INDEX
from manyclass.errors import UserError

Array = np.ndarray[Any, Any]

_MIN_HELD_BACK_ITEMS = 3  # a user with fewer items has none held back
# Items at the end of a user that are not input; the first of them is the target.
_LAST_ITEMS = {"valid": 2, "test": 1, "next": 0}


@dataclass(frozen=True)
class Sequences:
    """The items of each user, or of each session, in the order of time; ids of items go from frequent to rare.

    If items are held back, the last item of a user is the test target, the one before it the validation target, and
    all others are for training; all items of a user with fewer than three are for training. If none are held back, all
    items are for training, and the last item of each user with two or more is the test target.

    Args:
        items: int64 [N], the items of all users, concatenated.
        starts: int64 [U + 1], the position of each user's first item.
        item_names, user_names: the name of each id.
        left_out: int64 [U], lines of each user left out because the model does not know their item. None: 0 for all.
        last_unknown: bool [U], True if the last line of the user was left out, so that there is no test target. None:
            False for all.
        fault: the error of the first line that could not be read, after which reading ended. None: there is none.
        held_back: whether the last two items of a user with three or more are not for training.

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
    left_out: Tensor | None = None
    last_unknown: Tensor | None = None
    fault: UserError | None = None
    held_back: bool = True

    @property
    def num_items(self) -> int:
        """The number of items, the classes."""
        return len(self.item_names)

    @property
    def num_users(self) -> int:
        """The number of users."""
        return len(self.starts) - 1

    @property
    def unknown(self) -> int:
        """The number of lines left out because the model does not know their item."""
        return 0 if self.left_out is None else int(self.left_out.sum())

    @property
    def train_ends(self) -> Tensor:
        """The end of each user's training items, int64 [U]."""
        number = self.starts.diff()
        return self.starts[1:] - torch.where((number >= _MIN_HELD_BACK_ITEMS) & self.held_back, 2, 0)

    def digest(self) -> str:
        """Return a digest of all users' items, by which the same data is known again."""
        digest = hashlib.sha256(self.starts.numpy().tobytes())
        digest.update(self.items.numpy().tobytes())
        return digest.hexdigest()

    def counts(self) -> Tensor:
        """Return the number of training occurrences of each item, int64 [C]."""
        kept = torch.zeros(len(self.items) + 1, dtype=torch.int64)
        kept.index_add_(0, self.starts[:-1], torch.ones(self.num_users, dtype=torch.int64))
        kept.index_add_(0, self.train_ends, -torch.ones(self.num_users, dtype=torch.int64))
        return torch.bincount(self.items[kept.cumsum(0)[:-1] > 0], minlength=self.num_items)

    def last_batches(
        self,
        split: str,
        size: int,
        *,
        length: int,
        seen: bool = True,
        limit: int | None = None,
        share: Share = WHOLE,
    ) -> "LastBatches":
        """Return batches to predict the next item of each user, see `LastBatches`."""
        return LastBatches(self, split, size, length=length, seen=seen, limit=limit, share=share)


class SequenceBatches:
    """Batches `(inputs, target)` to train a recurrent encoder: each item is the target of the items before it.

    A user's items are cut into pieces of at most `length` steps, starting at the end. Inputs int64 [B, T], T the
    length of the longest piece; after the end of a piece inputs are 0 and targets −100, which losses ignore.

    Args:
        sequences: items of all users.
        size: B.
        length: maximum steps of a piece.
        seed: seed of the orders, a different one each epoch. None: users in the order of their ids.
        share: the part of each batch to give. Default: all of it.

    Raises:
        ValueError: `size` or `length` is below 1.

    Example:
        >>> sequences = Sequences(torch.tensor([5, 3, 4, 3, 1]), torch.tensor([0, 5]), Names("abcdef"), Names("u"))
        >>> [(inputs.tolist(), target.tolist()) for inputs, target in SequenceBatches(sequences, 2, length=8)]
        [([[5, 3]], [[3, 4]])]
    """

    def __init__(
        self, sequences: Sequences, size: int, *, length: int, seed: int | None = None, share: Share = WHOLE
    ) -> None:
        self._share = share
        self._items = sequences.items.numpy()
        self._size, self._seed, self._epoch = _check.integer("size", size, 1), seed, 0
        _check.integer("length", length, 1)
        first, last = sequences.starts[:-1].numpy(), sequences.train_ends.numpy() - 1
        steps = np.maximum(last - first, 0)
        pieces = -(-steps // length)
        # Pieces of a user, from last to first.
        back = runs(np.zeros_like(pieces), pieces)
        self._end = np.repeat(last, pieces) - back * length
        self._begin = np.maximum(self._end - length, np.repeat(first, pieces))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._end) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self._end)
        order = np.arange(n) if self._seed is None else np.random.default_rng([self._seed, self._epoch]).permutation(n)
        for first in range(0, n, self._size):
            batch = order[first : first + self._size]
            chosen = self._share.of(batch)
            begin, number = self._begin[chosen], self._end[chosen] - self._begin[chosen]
            target = _padded(self._items, begin + 1, number, IGNORE_INDEX)
            yield _padded(self._items, begin, number, 0), self._share.targets(target, size=len(batch))


class LastBatches:
    """Batches `(inputs, lengths, target, seen)` to rank all items by a user's last ones.

    Inputs int64 [B, T]: the last `length` items before the target, then 0; lengths int64 [B]; target int64 [B]; seen
    int64 [B, E]: the user's other items before the target, padded with −1, for filtered ranking.

    Args:
        sequences: items of all users.
        split: "valid": the target is the last item but one; "test": the last. Users with fewer than three items are
            left out; if no items are held back, "test" leaves out those with fewer than two. "next": all items of every
            user are input, and the target is −100.
        size: B.
        length: maximum T.
        seen: True to return `seen`; else E is 0. A user with very many items makes a batch that wide.
        limit: maximum number of users, evenly spaced. None: all.
        share: the part of each batch to give. Default: all of it.

    Attributes:
        users: int64, the users in the order of the batches.

    Raises:
        ValueError: `size` or `length` is below 1, or `split` is unknown.
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
        share: Share = WHOLE,
    ) -> None:
        _check.choice("split", split, tuple(_LAST_ITEMS))
        self._seen, self._share = seen, share
        self._items, self._split = sequences.items.numpy(), split
        self._size, self._length = _check.integer("size", size, 1), _check.integer("length", length, 1)
        starts = sequences.starts.numpy()
        number = np.diff(starts)
        least = 2 if split == "test" and not sequences.held_back else _MIN_HELD_BACK_ITEMS
        users = np.flatnonzero(number >= (1 if split == "next" else least))
        if split == "test" and sequences.last_unknown is not None:
            users = users[~sequences.last_unknown.numpy()[users]]
        if limit is not None:
            users = users[:: max(1, -(-len(users) // limit))]
        self.users = torch.from_numpy(users)
        self._begin, self._end = starts[users], starts[users + 1] - _LAST_ITEMS[split]

    def __len__(self) -> int:
        return -(-len(self._end) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for first in range(0, len(self._end), self._size):
            batch = np.arange(first, min(first + self._size, len(self._end)))
            chosen = self._share.of(batch)
            begin, end = self._begin[chosen], self._end[chosen]
            number = np.minimum(end - begin, self._length)
            inputs = _padded(self._items, end - number, number, 0)
            seen = _padded(self._items, begin, end - begin if self._seen else np.zeros_like(end), -1)
            wanted = np.full(len(end), IGNORE_INDEX) if self._split == "next" else self._items[end]
            target = torch.from_numpy(wanted)
            seen = seen.masked_fill_(seen == target[:, None], -1)
            yield inputs, torch.from_numpy(number), self._share.targets(target, size=len(batch)), seen


def read_sequences(
    path: Path,
    *,
    item_names: Names | None = None,
    until_fault: bool = False,
    name: str = "data",
    progress: ReadProgress | None = None,
) -> Sequences:
    """Read interactions, one a line in the order of time: user and item, separated by a TAB or spaces.

    Blank lines and spaces around a name are ignored.

    Args:
        path: a UTF-8 file; .gz, .xz and .bz2 are decompressed. Lines of a user need not be adjacent.
        item_names: items of a trained model; lines of other items are left out, their users are not. None: the items
            of the file.
        until_fault: True to return the lines before the first that cannot be read, with its error as `fault`.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and in total.

    Raises:
        UserError: the file cannot be read, has a line of another form, or fewer than two items.
    """
    users, items = Names(), Names() if item_names is None else item_names
    user_of, item_of = array("q"), array("q")
    left_out, last_unknown = array("q"), set[int]()
    fault: UserError | None = None
    try:
        for named_user, named_item in _interactions(path, name, progress):
            user = users.add(named_user)
            known = items.add(named_item) if item_names is None else items.ids(named_item)
            if known is None:
                left_out.append(user)
                last_unknown.add(user)
                continue
            last_unknown.discard(user)
            item_of.append(known)
            user_of.append(user)
    except UserError as error:
        if not until_fault or not item_of:
            raise
        fault = error
    if not item_of:
        what = f"of {len(left_out):,} lines none has an item that the model knows" if left_out else "got none"
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
    return Sequences(
        torch.from_numpy(sequence),
        torch.from_numpy(starts),
        items,
        users,
        torch.from_numpy(np.bincount(np.array(left_out, dtype=np.int64), minlength=len(users))),
        ends,
        fault,
    )


def _interactions(path: Path, name: str, progress: ReadProgress | None) -> Iterator[tuple[str, str]]:
    """Yield user and item of each line."""
    for place, line in enumerate(lines(path, name=name, progress=progress), 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if len(fields) != 2 or not all(fields):
            raise UserError(
                f"`{name}` must hold user and item in each line, got {shown(line)} in line {place} of {path}"
            )
        if fault := next(filter(None, map(label_fault, fields)), None):
            raise UserError(f"`{name}` {fault} in line {place} of {path}")
        yield fields[0], fields[1]


def _padded(items: Array, begin: Array, number: Array, pad: int) -> Tensor:
    """Gather runs of items into [B, T], T the length of the longest run."""
    place = np.arange(number.max(initial=0))
    found = items[np.minimum(begin[:, None] + place, len(items) - 1)]
    return torch.from_numpy(np.where(place < number[:, None], found, pad))
