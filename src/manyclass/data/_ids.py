"""Growing lists of token ids, in memory or in a file that is memory-mapped."""

from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

_BUFFERED_IDS = 1 << 16


class Ids:
    """A list of ids that grows.

    Args:
        size: maximum number of ids.
        path: a file to store them in. None: in memory.

    Example:
        >>> ids = Ids(3)
        >>> ids.add([4, 0])
        >>> len(ids), ids.tensor()
        (2, tensor([4, 0]))
    """

    def __init__(self, size: int, path: Path | None = None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None if path is None else path.open("wb")
        self._array: np.ndarray[Any, Any] = np.empty(size if path is None else 0, dtype=np.int64)
        self._held: list[int] = []
        self._written = 0

    def __len__(self) -> int:
        return self._written + len(self._held)

    def add(self, ids: list[int]) -> None:
        """Append ids."""
        self._held += ids
        if len(self._held) >= _BUFFERED_IDS:
            self._write()

    def tensor(self) -> Tensor:
        """Return all ids, int64, and close the list."""
        self._write()
        self.close()
        if self._path is None:
            return torch.from_numpy(self._array[: self._written])
        # Copy on write, since torch takes no read-only arrays.
        return torch.from_numpy(np.memmap(self._path, np.int64, "c"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        ids = np.array(self._held, dtype=np.int64)
        if self._file is None:
            self._array[self._written : self._written + len(ids)] = ids
        else:
            self._file.write(ids.data)
        self._written += len(ids)
        self._held = []
