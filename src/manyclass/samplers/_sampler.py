"""The protocol of samplers, and the functions they share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._shard import Shard
from manyclass.candidates import Candidates, contained
from manyclass.samplers.error_probe import ErrorProbe


@dataclass(frozen=True)
class StepClock:
    """The times that a training step would take with other samplers, measured when they are asked for.

    Args:
        device: the device of the step.
        seconds: returns the time of the loss and its gradients in this step with a sampler; NaN if the parameters are
            divided among processes, so that one alone cannot tell.
        exact: returns the fastest way to the exact loss in this step, and the seconds of it, of its gradients and of
            the update of all rows that it touches; NaN as above.
    """

    device: torch.device
    seconds: "Callable[[Sampler], float]"
    exact: Callable[[], tuple[str | None, float]]


@dataclass(frozen=True)
class Observation:
    """The outcome of a training step, as a head shows it to its sampler.

    The functions cost time, so a sampler calls only those it needs.

    Args:
        candidates: the draw of the step.
        hidden: [B, D], or whatever a scorer takes, without gradients.
        probability: returns [ΣK], the root mean square of each slot's u/Z̃ over examples of its block's first group, 0
            in those that exclude the class.
        trial: returns the mean square of log Z̃ - log Z that another sampler would have in this step, on a few of its
            examples, or on all if the step scored all classes, from a draw with a separate generator of the given
            seed; NaN if all of them are ignored.
        clock: measures the times of this step.
    """

    candidates: Candidates
    hidden: Tensor
    probability: Callable[[], Tensor]
    trial: "Callable[[Sampler, int], float]"
    clock: StepClock


class Sampler(Protocol):
    """A choice of the classes to score for a batch of targets, and of κ, how many classes each of them stands for.

    The promise: for any function g of classes, the expectation of Σ κ g(id) over the slots not excluded is the sum
    of g over all classes not excluded. A sampler that cannot keep it has `unbiased` False.

    The life cycle is the same for all. A head calls `attach` when it takes the sampler; then, for each training step,
    `advance`, `draw` and, if the sampler learns, `observe`. Evaluations and probes only draw, and drawing changes
    nothing that later draws depend on. Wrappers pass every call on.
    """

    @property
    def num_classes(self) -> int: ...

    @property
    def device(self) -> torch.device | None:
        """The device of its tables; None if it has no tables."""
        ...

    @property
    def unbiased(self) -> bool: ...

    @property
    def renormalises(self) -> bool:
        """True if it draws from the complement of `exclude`; False if excluded classes become empty slots."""
        ...

    @property
    def learns(self) -> bool:
        """True if `observe` changes later draws."""
        ...

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Keep references to class vectors [C, D] and biases [C]; later calls read their current values."""
        ...

    def advance(self) -> None:
        """Count a training step, before its draw: start a rebuild that is due, take up one that has finished."""
        ...

    def __call__(
        self,
        target: Tensor,
        *,
        hidden: Tensor | None = None,
        include: Tensor | None = None,
        exclude: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Candidates:
        """Draw for targets [B].

        Args:
            target: ids [B].
            hidden: [B, D], for samplers that depend on it.
            include: ids [B, I], -1 pads: classes that an example sums explicitly, with κ = 1.
            exclude: ids [B, E], -1 pads: classes that are not candidates for an example, not even if included.
            generator: for the draw.
        """
        ...

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments: int64 [B] and [B, E], all in range.

        Classes that it returns as `included` must not be among those an example excludes.
        """
        ...

    def observe(self, observation: Observation) -> None:
        """Learn from a training step, after its draw was scored."""
        ...

    def to(self, device: torch.device) -> Self:
        """Move the tables to a device, as nn.Module does."""
        ...

    def refresh(self) -> None:
        """Rebuild the tables from the counts, in O(C)."""
        ...

    def resize(self, num_classes: int) -> None:
        """Change the number of classes; class vectors must then be attached again."""
        ...


@runtime_checkable
class SubsetSampler(Sampler, Protocol):
    """A sampler that can draw from a subset of its classes."""

    @property
    def k(self) -> int | None: ...

    def without(self, ids: Tensor) -> "SubsetSampler":
        """Return the same design over all classes but these, which are summed elsewhere."""
        ...

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes that the design draws most often, in ascending order."""
        ...


@runtime_checkable
class DivisibleSampler(Sampler, Protocol):
    """A sampler whose classes can be divided among processes.

    Each process then draws its part of one draw, the same as an undivided sampler's: its blocks hold classes of this
    process alone.
    """

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone, of a sampler that all processes have."""
        ...


@runtime_checkable
class AdjustableSampler(Sampler, Protocol):
    """A sampler whose number of drawn classes can be changed."""

    @property
    def k(self) -> int | None:
        """The number of classes drawn; None if it cannot be changed."""
        ...

    def set_k(self, k: int) -> None:
        """Draw another number of classes from now on. May rebuild tables of C entries."""
        ...


class ReplayableSampler(Sampler, Protocol):
    """A sampler whose draw can be recorded once and replayed by a GPU.

    A replay repeats the work of the device in `draw` and `observe`, and none of the Python; `advance` is called before
    each replay.
    """

    def is_settled(self, draws: int) -> bool:
        """Return True if the next training steps would measure, build and decide nothing after the first `advance`.

        Args:
            draws: the number of them, all in one recorded step.
        """
        ...

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the objects that a recorded draw reads, up to date; another one calls for another recording.

        Args:
            compiled: whether the draw is part of a compiled graph.
        """
        ...


@runtime_checkable
class DecidingSampler(Sampler, Protocol):
    """A sampler that changes its design when the error of log Z̃ calls for it."""

    @property
    def probe(self) -> ErrorProbe:
        """The probe it decides by; the head records into it before `observe`."""
        ...

    @property
    def decisions(self) -> list[str]:
        """A sentence for each decision so far: what was measured, what was chosen."""
        ...

    def begin(self, clock: StepClock) -> None:
        """Decide before the draw of a training step what can be decided by times alone."""
        ...


def deciding_part(sampler: Sampler) -> DecidingSampler | None:
    """Return the sampler, or the one that it wraps, that decides; None if there is none."""
    # A step calls this: `isinstance` with a protocol would take longer than its draw, and `modules()` a quarter of it.
    parts: list[Any] = [sampler] if isinstance(sampler, nn.Module) else []
    for part in parts:
        if hasattr(part, "decisions"):
            found: DecidingSampler = part
            return found
        parts.extend(part.children())
    return None


def divide(sampler: Sampler, shard: Shard) -> None:
    """Keep the classes of this process alone.

    Raises:
        TypeError: the sampler cannot be divided.
    """
    # Not isinstance: a protocol with properties would evaluate them.
    if not hasattr(sampler, "divide"):
        raise TypeError(
            "`sampler` must be one whose classes can be divided among processes: Exhaustive, Importance, Learned, "
            f"Systematic, Tailored or WithExplicit, got {type(sampler).__name__}"
        )
    sampler.divide(shard)


def replayable(sampler: Sampler) -> ReplayableSampler:
    """Return a sampler as one whose draw can be replayed.

    Raises:
        TypeError: its draw depends on Python in each step.
    """
    # Not isinstance: a protocol with properties would evaluate them.
    if not hasattr(sampler, "pinned"):
        raise TypeError(f"`sampler` must be one whose draw can be replayed, got {type(sampler).__name__}")
    return sampler  # type: ignore[return-value]


def has_rebuilds(sampler: Sampler) -> bool:
    """Return True if the sampler, or one that it wraps, rebuilds tables on a background thread."""
    parts = sampler.modules() if isinstance(sampler, nn.Module) else ()
    return any(hasattr(part, "schedule") for part in parts)


def checked_draw(
    self: Sampler,
    target: Tensor,
    *,
    hidden: Tensor | None = None,
    include: Tensor | None = None,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Candidates:
    """Check the arguments, then draw: the `forward` of every sampler."""
    target, include, exclude = check_call(self, target, include, exclude)
    return draw_including(self, target, include, exclude, hidden=hidden, generator=generator)


def draw_including(
    sampler: Sampler,
    target: Tensor,
    include: Tensor | None,
    exclude: Tensor,
    *,
    hidden: Tensor | None,
    generator: torch.Generator | None,
) -> Candidates:
    """Draw for checked arguments, and append the classes that each example includes.

    The sampler excludes them from its draw, so that its promise holds for the rest, and each counts once with κ = 1.
    """
    if include is None or include.shape[1] == 0:
        return sampler.draw(target, exclude, hidden=hidden, generator=generator)
    ascending = include.sort(1).values
    repeated = F.pad(ascending[:, 1:] == ascending[:, :-1], (1, 0))
    excluded = contained(ascending, exclude.unsqueeze(1)).squeeze(1)
    kept = ascending.masked_fill(repeated | excluded, -1)
    drawn = sampler.draw(target, torch.cat([exclude, kept], 1), hidden=hidden, generator=generator)
    of_draw = drawn.target_log_kappa

    def target_log_kappa() -> Tensor:
        assert of_draw is not None
        return of_draw().masked_fill((kept == target.unsqueeze(1)).any(1), 0.0)

    return replace(
        drawn,
        included=kept if drawn.included is None else torch.cat([drawn.included, kept], 1),
        target_log_kappa=None if of_draw is None else target_log_kappa,
    )


def no_vectors(self: Sampler, weight: Tensor, bias: Tensor | None = None) -> None:
    """Ignore the class vectors: the `attach` of designs that do not depend on them."""


def always_settled(self: Sampler, draws: int) -> bool:
    """Return True: the `is_settled` of designs that never measure, build or decide."""
    return True


def no_schedule(self: Sampler) -> None:
    """Do nothing: the `advance` of designs without rebuilds."""


def no_learning(self: Sampler, observation: Observation) -> None:
    """Learn nothing: the `observe` of designs that stay as they are."""


def check_life_cycle(sampler: Sampler) -> None:
    """Raise TypeError unless the sampler has every member of the life cycle."""
    for name in ("learns", "attach", "advance", "draw", "observe", "refresh", "resize"):
        if not hasattr(sampler, name):
            raise TypeError(
                f"`sampler` must have the members of samplers.Sampler, got a {type(sampler).__name__} without {name!r}"
            )


def check_call(
    sampler: Sampler, target: Tensor, include: Tensor | None, exclude: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return targets as int64 [B], inclusions as int64 [B, I] or None, and exclusions as int64 [B, E], checked."""
    num_classes, device = sampler.num_classes, sampler.device
    target = _check.ids("target", target, num_classes)
    batch = target.shape[0] if target.dim() == 1 else 0
    if batch == 0:
        raise ValueError(f"`target` must be a vector of at least one class, got shape {list(target.shape)}")
    if device is not None:
        _check.device("target", target, device)
    if include is not None:
        include = _check.ids_by_example("include", include, num_classes, target)
    if exclude is None:
        return target, include, target.new_empty(batch, 0)
    return target, include, _check.ids_by_example("exclude", exclude, num_classes, target)


def check_vectors(weight: Tensor, bias: Tensor | None, num_classes: int) -> None:
    """Raise TypeError or ValueError unless `weight` is a Tensor [C, D] and `bias`, if any, [C]."""
    _check.tensor("weight", weight)
    if weight.dim() != 2 or weight.shape[0] != num_classes:
        raise ValueError(f"`weight` must have shape [{num_classes}, D], got {list(weight.shape)}")
    if bias is not None:
        _check.shape("bias", bias, (num_classes,))


def num_groups(target: Tensor, group_size: int | None) -> int:
    """Return the number of groups that share a draw; with a `group_size` of None the batch is one group."""
    return 1 if group_size is None else -(-target.shape[0] // group_size)


def check_group_size(group_size: int | None) -> int | None:
    """Return `group_size` if it is None or at least 1."""
    return None if group_size is None else _check.integer("group_size", group_size, 1)
