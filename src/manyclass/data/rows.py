"""Rows of features with their labels, and training batches of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyclass import _check
from manyclass.data.share import WHOLE, Share

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_BLOCK_EXAMPLES = 1024  # read together, since they are contiguous on disk
_SHUFFLE_EXAMPLES = 1 << 22  # shuffled together in memory

Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """N examples; arrays may be memory maps.

    Args:
        features: float32 [N, F], dense, or CSR.
        labels: int64 [L], the class ids of all examples, concatenated.
        starts: int64 [N + 1], the position of each example's first label. None: each has one label.

    Raises:
        ValueError: the number of labels or starts does not match the number of rows.

    Example:
        >>> rows = Rows(np.eye(3, dtype=np.float32), np.array([0, 1, 1, 2]), np.array([0, 1, 3, 4]))
        >>> len(rows), rows.num_features, rows.sparse
        (3, 3, False)
    """

    features: "np.ndarray[Any, Any] | csr_array"
    labels: "np.ndarray[Any, Any]"
    starts: "np.ndarray[Any, Any] | None" = None

    def __post_init__(self) -> None:
        if self.starts is None and len(self.labels) != len(self):
            raise ValueError(f"`labels` must have length {len(self)}, got {len(self.labels)}")
        if self.starts is not None and len(self.starts) != len(self) + 1:
            raise ValueError(f"`starts` must have length {len(self) + 1}, got {len(self.starts)}")

    def __len__(self) -> int:
        return int(self.features.shape[0])

    @property
    def num_features(self) -> int:
        """The number of features, F."""
        return int(self.features.shape[1])

    @property
    def sparse(self) -> bool:
        """True if features are CSR."""
        return not isinstance(self.features, np.ndarray)

    def inputs(self, rows: "np.ndarray[Any, Any]") -> Inputs:
        """Return an encoder's input: a matrix [B, F]; for sparse rows a dict of columns, values, and starts of rows."""
        if isinstance(self.features, np.ndarray):
            return as_inputs(self.features[rows])
        # Not by SciPy, whose indexing copies all columns of a memory map whose starts have a wider dtype.
        start = self.features.indptr
        begin = start[rows].astype(np.int64)
        number = start[rows + 1] - begin
        place = runs(begin, number)
        return {
            "columns": torch.from_numpy(self.features.indices[place].astype(np.int64)),
            "starts": torch.from_numpy(np.cumsum(number) - number),
            "values": torch.from_numpy(self.features.data[place].astype(np.float32)),
        }


def as_inputs(features: "np.ndarray[Any, Any] | csr_array") -> Inputs:
    """Convert rows [B, F] to an encoder's input, see `Rows.inputs`."""
    if isinstance(features, np.ndarray):
        # Torch takes no read-only arrays, as memory maps are.
        return torch.from_numpy(np.require(features, np.float32, ["C", "W"]))
    return {
        "columns": torch.from_numpy(features.indices.astype(np.int64)),
        "starts": torch.from_numpy(features.indptr[:-1].astype(np.int64)),
        "values": torch.from_numpy(features.data.astype(np.float32)),
    }


def class_counts(labels: "np.ndarray[Any, Any]", num_classes: int) -> "np.ndarray[Any, Any]":
    """Count the examples of each class [C], int64, in bounded memory.

    Example:
        >>> class_counts(np.array([2, 0, 2]), 4)
        array([1, 0, 2, 0])
    """
    counts: np.ndarray[Any, Any] = np.zeros(num_classes, dtype=np.int64)
    for begin in range(0, len(labels), _SHUFFLE_EXAMPLES):
        part = labels[begin : begin + _SHUFFLE_EXAMPLES]
        if part.min() < 0 or part.max() >= num_classes:
            bad = int(np.flatnonzero((part < 0) | (part >= num_classes))[0])
            raise ValueError(f"`labels` must lie in [0, {num_classes}), got {part[bad]} at position {begin + bad}")
        counts += np.bincount(part, minlength=num_classes)
    return counts


def runs(begin: "np.ndarray[Any, Any]", number: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return the positions begin, begin + 1, … of each run, concatenated."""
    place: np.ndarray[Any, Any] = np.repeat(begin - (np.cumsum(number) - number), number)
    return place + np.arange(len(place))


class RowBatches:
    """Batches `(inputs, target, extras)` of rows for `Training`, each epoch in a different order.

    A row of n labels gives n examples of weight 1/n, and excludes its other labels as negatives of each. A row without
    labels gives no example.

    Args:
        rows: all rows.
        size: examples in a batch.
        seed: seed of the orders. None: the order of the rows.
        chosen: int64, ascending: the rows to use. None: all.
        weight: float32 [N], weight of each row. None: 1.
        share: the part of each batch to give. Default: all of it.

    Raises:
        ValueError: `size` is below 1.

    Example:
        >>> rows = Rows(np.eye(3, dtype=np.float32), np.array([0, 1, 2, 0]), np.array([0, 1, 3, 4]))
        >>> inputs, target, extras = next(iter(RowBatches(rows, 4)))
        >>> target, extras["weight"], extras["exclude"].tolist()
        (tensor([0, 1, 2, 0]), tensor([1.0000, 0.5000, 0.5000, 1.0000]), [[-1, -1], [-1, 2], [1, -1], [-1, -1]])
    """

    def __init__(
        self,
        rows: Rows,
        size: int,
        *,
        seed: int | None = None,
        chosen: "np.ndarray[Any, Any] | None" = None,
        weight: "np.ndarray[Any, Any] | None" = None,
        share: Share = WHOLE,
    ) -> None:
        self._rows, self._seed, self._weight, self._share = rows, seed, weight, share
        self._size = _check.integer("size", size, 1)
        self._epoch = 0
        self._chosen = np.arange(len(rows)) if chosen is None else chosen
        if rows.starts is None:
            self._row, self._place = self._chosen, self._chosen
        else:
            # One example for each label of the chosen rows.
            begin, number = rows.starts[self._chosen], rows.starts[self._chosen + 1] - rows.starts[self._chosen]
            self._row = np.repeat(self._chosen, number)
            self._place = runs(begin, number)

    @property
    def targets(self) -> "np.ndarray[Any, Any]":
        """The class of each example, int64."""
        return np.asarray(self._rows.labels[self._place], dtype=np.int64)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._row) // self._size)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor, dict[str, Tensor]]]:
        for part in self._orders():
            for begin in range(0, len(part), self._size):
                yield self._batch(part[begin : begin + self._size])

    def _orders(self) -> Iterator["np.ndarray[Any, Any]"]:
        """Yield the examples in the order of this epoch, in parts of whole batches except the last."""
        n = len(self._row)
        if self._seed is None:
            yield np.arange(n)
            return
        generator = np.random.default_rng([self._seed, self._epoch])
        if n <= _SHUFFLE_EXAMPLES:
            yield generator.permutation(n)
            return
        # Shuffle blocks, then examples within the blocks that memory holds: the disk is read in long runs.
        blocks = generator.permutation(-(-n // _BLOCK_EXAMPLES))
        held = np.empty(0, dtype=np.int64)
        for first in range(0, len(blocks), _SHUFFLE_EXAMPLES // _BLOCK_EXAMPLES):
            starts = blocks[first : first + _SHUFFLE_EXAMPLES // _BLOCK_EXAMPLES, None] * _BLOCK_EXAMPLES
            fresh = (starts + np.arange(_BLOCK_EXAMPLES)).ravel()
            held = np.concatenate([held, generator.permutation(fresh[fresh < n])])
            whole = len(held) - len(held) % self._size
            yield held[:whole]
            held = held[whole:]
        yield held

    def _batch(self, examples: "np.ndarray[Any, Any]") -> tuple[Inputs, Tensor, dict[str, Tensor]]:
        # Ascending, so that the disk is read forwards; the order within a batch does not matter.
        size, examples = len(examples), self._share.of(np.sort(examples))
        row, place = self._row[examples], self._place[examples]
        target = torch.from_numpy(np.asarray(self._rows.labels[place], dtype=np.int64))
        target = self._share.targets(target, size=size)
        extras: dict[str, Tensor] = {}
        weight = None if self._weight is None else self._weight[row].astype(np.float32)
        if self._rows.starts is not None:
            begin, number = self._rows.starts[row], self._rows.starts[row + 1] - self._rows.starts[row]
            weight = (1 if weight is None else weight) / number.astype(np.float32)
            column = np.arange(number.max(initial=1))
            others = self._rows.labels[np.minimum(begin[:, None] + column, len(self._rows.labels) - 1)]
            own = begin[:, None] + column == place[:, None]
            others = np.where((column < number[:, None]) & ~own, others, -1)
            if others.shape[1] > 1:
                extras["exclude"] = torch.from_numpy(others.astype(np.int64))
        if weight is not None:
            extras["weight"] = torch.from_numpy(weight)
        return self._rows.inputs(row), target, extras
