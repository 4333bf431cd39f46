"""What every sampler is, and what they share."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from manyclass import _check
from manyclass.candidates import Candidates


class Sampler(Protocol):
    """Says which classes to score for a batch of targets, and how many classes each of them stands for.

    The promise: for any function g of classes, the expectation of Σ κ g(id) over the slots not excluded is the sum
    of g over all classes not excluded. A sampler that cannot give it has `unbiased` False.
    """

    @property
    def num_classes(self) -> int: ...

    @property
    def device(self) -> torch.device | None:
        """Where its tables are; None where it has none."""
        ...

    @property
    def unbiased(self) -> bool: ...

    @property
    def renormalises(self) -> bool:
        """Whether it draws from the complement of `exclude`, rather than leave hits to be emptied."""
        ...

    def __call__(
        self,
        target: Tensor,
        *,
        hidden: Tensor | None = None,
        exclude: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Candidates:
        """Draw for targets [B]; `exclude` [B, E] (-1 pads) names classes that are no candidates for an example."""
        ...

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """As a call, for arguments that have been checked: int64 [B] and [B, E], all in range."""
        ...

    def to(self, device: torch.device) -> Self:
        """Move its tables, as every Module does."""
        ...

    def refresh(self) -> None:
        """Rebuild from the counts the sampler was given: the only work that grows with C after set-up."""
        ...

    def resize(self, num_classes: int) -> None:
        """Follow a change of the number of classes."""
        ...


@runtime_checkable
class TableSampler(Sampler, Protocol):
    """A sampler drawn from a table, which can be told to leave classes to somebody else."""

    @property
    def k(self) -> int | None: ...

    def without(self, ids: Tensor) -> "TableSampler":
        """The same design over all classes but these, which somebody else sums."""
        ...

    def heaviest(self, n: int) -> Tensor:
        """The n classes that the design draws most often, in ascending order."""
        ...


@runtime_checkable
class FollowingSampler(Sampler, Protocol):
    """A sampler that looks at class vectors: a head shows it its own."""

    def follow(self, vectors: Tensor, bias: Tensor | None = None) -> None:
        """Draw with regard to these vectors [C, D] and biases [C], as they will be at each draw."""
        ...


@runtime_checkable
class LearningSampler(Sampler, Protocol):
    """A sampler that learns from what its draws carried; all of a batch share them."""

    def observe(self, candidates: Candidates, p: Tensor) -> None:
        """Told after a training step's draw: p [K] is the root of the mean over the batch of (u/Z̃)² of each slot."""
        ...


@runtime_checkable
class AdjustableSampler(Sampler, Protocol):
    """A sampler whose number of classes drawn can be changed."""

    @property
    def k(self) -> int | None: ...

    def set_k(self, k: int) -> None:
        """Draw another number of classes from now on. May rebuild tables of C entries."""
        ...


class BudgetedSampler(Sampler, Protocol):
    """A sampler that is told the error of log Z̃ now and then, and draws with another one."""

    @property
    def sampler(self) -> Sampler:
        """The one that draws, and that learns if it can."""
        ...

    def due(self) -> bool:
        """Whether the error is wanted in this training step, which is counted."""
        ...

    def take_error(self, error: float) -> None:
        """Told the root-mean-square error of log Z̃; NaN where there was nothing to measure."""
        ...


class Upkeep(NamedTuple):
    """Something that a sampler does now and then, beside its draws."""

    run: Callable[[], None]
    every: int


@runtime_checkable
class UpkeptSampler(Sampler, Protocol):
    """A sampler whose steps are not all alike: what it does now and then can be asked for, and timed."""

    def upkeep(self) -> Iterator[Upkeep]:
        """What is done now and then, and how often."""
        ...


def checked_draw(
    self: Sampler,
    target: Tensor,
    *,
    hidden: Tensor | None = None,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Candidates:
    """What every sampler does when it is called: check the arguments, then draw."""
    return self.draw(*check_call(self, target, exclude), hidden=hidden, generator=generator)


def check_call(sampler: Sampler, target: Tensor, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """Targets as int64 [B] and exclusions as int64 [B, E], checked."""
    num_classes, device = sampler.num_classes, sampler.device
    target = _check.ids("target", target, num_classes)
    batch = target.shape[0] if target.dim() == 1 else 0
    if batch == 0:
        raise ValueError(f"`target` must be a vector of at least one class, got shape {list(target.shape)}")
    if device is not None:
        _check.device("target", target, device)
    if exclude is None:
        return target, target.new_empty(batch, 0)
    exclude = _check.ids("exclude", exclude, num_classes, pads=True)
    if exclude.dim() != 2 or exclude.shape[0] != batch:
        raise ValueError(f"`exclude` must have shape [{batch}, E], got {list(exclude.shape)}")
    _check.device("exclude", exclude, target.device)
    return target, exclude


def check_vectors(vectors: Tensor, num_classes: int) -> None:
    """Raise where a sampler is shown something else than a vector for each class."""
    _check.tensor("vectors", vectors)
    if vectors.dim() != 2 or vectors.shape[0] != num_classes:
        raise ValueError(f"`vectors` must have shape [{num_classes}, D], got {list(vectors.shape)}")


def num_groups(target: Tensor, group_size: int | None) -> int:
    return 1 if group_size is None else -(-target.shape[0] // group_size)


def check_group_size(group_size: int | None) -> int | None:
    return None if group_size is None else _check.whole("group_size", group_size, 1)
