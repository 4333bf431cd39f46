"""Epochs of batches that can be left and entered again."""

import itertools
from collections.abc import Iterable, Iterator, Sized

import torch
from torch import Tensor

from manyclass.training import _random
from manyclass.training.history import Progress


class Stream:
    """Opens the batches once an epoch and finds the place where a training was.

    Args:
        batches: an iterable.
        device: of the head, whose global generator is kept.
    """

    def __init__(self, batches: Iterable[object], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._opened = False
        self.one_shot = isinstance(batches, Iterator)
        # torch's global randomness when the epoch began: a loader may have shuffled by it.
        self.random_at_epoch: list[Tensor] = []

    def __len__(self) -> int:
        """Of an epoch; 0 where it is unknown."""
        return len(self._batches) if isinstance(self._batches, Sized) else 0

    def unseen(self, at: Progress) -> Iterator[object]:
        """The batches of this epoch that are still to come.

        Raises:
            ValueError: there are fewer than were seen of it before.
        """
        now = _random.state(self._device)
        # An iterator that is read on is where it was; a new one, like all other iterables, begins at the beginning.
        seen = 0 if self.one_shot and self._opened else at.position
        if at.position == 0:
            self.random_at_epoch = now
        elif seen:
            _random.restore(self.random_at_epoch, self._device)
        for source in (self._batches, getattr(self._batches, "sampler", None)):
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(at.epoch)
        stream = iter(self._batches)
        self._opened = True
        if seen:
            found = sum(1 for _ in itertools.islice(stream, seen))
            if found < seen:
                raise ValueError(f"`batches` must hold the {seen} of this epoch that were seen before, got {found}")
            _random.restore(now, self._device)
        return stream
