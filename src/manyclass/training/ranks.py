"""The processes of one training: numbers that they agree on, and work that the first of them does for all."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyclass.errors import UserError

T = TypeVar("T")
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Ranks:
    """The processes that train or evaluate one model; every method but `is_first` is called by all of them together.

    They take the same steps on parts of the same batches. What depends on a clock, a signal or a file must be the same
    on all of them, or they would wait for each other in different places.

    Args:
        rank: this process, from 0.
        number: the number of processes, those of torch.distributed's default group; 1: this process alone.
        timeout: the time after which an exchange fails that a process does not join.

    Example:
        >>> ranks = Ranks()
        >>> ranks.is_first, ranks.of_first(3.5), ranks.any(False), ranks.total(2, 0.5)
        (True, 3.5, False, [2.0, 0.5])
    """

    rank: int = 0
    number: int = 1
    timeout: timedelta = timedelta(minutes=10)

    @property
    def is_first(self) -> bool:
        """True on the process that prints and writes files."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        """True if there is another process."""
        return self.number > 1

    def of_first(self, value: float) -> float:
        """Return a number of the first process, such as the time of its clock."""
        if not self.are_several:
            return value
        number = torch.tensor([value], dtype=torch.float64, device="cpu")
        dist.broadcast(number, 0)
        return number.item()

    def any(self, value: bool) -> bool:
        """Return True if the value is True on any process."""
        return self.total(value)[0] > 0 if self.are_several else value

    def total(self, *values: float) -> list[float]:
        """Return the sum over processes of each number."""
        if not self.are_several:
            return [float(value) for value in values]
        return self.summed(torch.tensor(values, dtype=torch.float64, device="cpu")).tolist()

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over processes of a tensor."""
        if self.are_several:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def by_first(self, work: Callable[[], T]) -> T | None:
        """Let the first process do some work, such as writing a file; the others wait for it.

        Returns:
            The result on the first process, None on the others.

        Raises:
            UserError: the work failed, on all processes.
        """
        return self.together(work) if self.is_first else self.together(lambda: None)

    def together(self, work: Callable[[], T]) -> T:
        """Let all processes do some work that needs no other process; they wait for each other.

        Raises:
            UserError: the work failed on one of them; it is raised on all.
        """
        if not self.are_several:
            return work()
        error, result = None, None
        try:
            result = work()
        except UserError as raised:
            error = raised
        found: list[UserError | None] = [None] * self.number
        dist.all_gather_object(found, error)
        for failure in (error, *found):
            if failure is not None:
                raise failure
        return result  # type: ignore[return-value]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Let one process after the other do some work, so that the memory it takes is needed once.

        Raises:
            UserError: the work failed on one of them; it is raised on all.
        """
        results: list[T] = []
        for turn in range(self.number):
            mine = turn == self.rank
            self.together(lambda mine=mine: results.append(work()) if mine else None)  # type: ignore[misc]
        return results[0]

    def seed(self, seed: int, step: int) -> None:
        """Seed torch on all processes but the first, each in another way: dropout must differ between them."""
        if not self.is_first:
            torch.manual_seed(seed + _SEED_STRIDE * (self.rank + self.number * step))


ALONE = Ranks()
