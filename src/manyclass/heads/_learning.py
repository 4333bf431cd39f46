"""The draw of a head, and the two calls of a training step that change its sampler.

A compiled graph cannot hold those calls: it would run their Python once, when it is traced. There they are opaque
operators. Each is said to write to a clock, so that the compiler neither removes nor repeats it.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from manyclass import _ranks
from manyclass._context import fork_rng, is_transformed
from manyclass._handle import Handle, owner_of
from manyclass._recording import is_recorded, present
from manyclass.candidates import Block, Candidates
from manyclass.heads._probe import (
    ProbedHead,
    estimates_log_z,
    exact_seconds,
    is_scorer,
    losses_over,
    mean_over_valid,
    mean_square_error,
    probe_step,
    steady_scores,
    step_seconds,
)
from manyclass.heads.examples import Examples
from manyclass.objectives import Objective
from manyclass.samplers import ErrorProbe, Observation, Sampler, StepClock, deciding_part, draw_including

# On the CPU: a CUDA graph, which would replay the kernels without the Python, is then not made.
_clock = torch.zeros((), dtype=torch.int64, device="cpu")


class LearningHead(ProbedHead, Protocol):
    """A head whose sampler follows its training steps."""

    @property
    def training(self) -> bool: ...

    @property
    def handle(self) -> Handle:
        """The number of this head in compiled graphs."""
        ...

    @property
    def own_probe(self) -> ErrorProbe:
        """The probe of the error of log Z̃, unless the sampler has one that it decides by."""
        ...

    @property
    def extra_probes(self) -> list[ErrorProbe]:
        """Further probes with other schedules, which decide nothing."""
        ...


def draw_candidates(
    head: LearningHead,
    examples: Examples,
    objective: Objective,
    generator: torch.Generator | None = None,
    *,
    attached: bool = False,
    sampler: Sampler | None = None,
) -> Candidates:
    """Draw candidates for examples, with their included classes; targets are excluded unless the objective keeps hits.

    Args:
        head: has the sampler.
        examples: the batch.
        objective: decides whether targets are excluded.
        generator: for the draw; None: torch's global generator.
        attached: whether the present class vectors are attached already.
        sampler: draws instead of the head's.
    """
    exclude = examples.exclude
    if not objective.keeps_hits:
        own = examples.target.unsqueeze(1)
        exclude = own if exclude is None else torch.cat([own, exclude], 1)
    elif exclude is None:
        exclude = examples.target.new_empty(len(examples.target), 0)
    if not attached and not is_transformed():
        attach_current(head)
    sampler = head.sampler if sampler is None else sampler
    if sampler.device not in (None, examples.target.device):
        raise ValueError(f"`sampler` must be on {examples.target.device}, got {sampler.device}")
    hidden = examples.hidden.detach()
    target = examples.target
    if examples.valid is not None and getattr(sampler, "draws_targets", False):
        target = target.masked_fill(~examples.valid, -1)
    found = draw_including(sampler, target, examples.include, exclude, hidden=hidden, generator=generator)
    return found if head.shard is None else found.part_of(head.shard)


def attach_current(head: LearningHead) -> None:
    """Attach the class vectors that the head has now: torch replaces them, for example by an assigned state dict."""
    weight, bias = head.class_vectors
    # Sharded vectors, and those without values, cannot be clustered.
    if weight is None or type(weight) not in (Tensor, nn.Parameter) or weight.is_meta:
        return
    sampler = head.sampler
    if sampler.device not in (None, weight.device):
        sampler.to(weight.device)
    # A parametrised weight is computed at each step, and must not keep its graph.
    sampler.attach(
        weight if weight.is_leaf else weight.detach(), bias if bias is None or bias.is_leaf else bias.detach()
    )


def advance(head: LearningHead, examples: Examples | None = None) -> None:
    """Let the sampler count a training step, before its draw.

    Args:
        head: has the sampler.
        examples: the batch, from which the sampler may measure times before it draws; None: it measures none.
    """
    if torch.compiler.is_compiling():
        advance_sampler(_clock, head.handle.number)
    # Ranks may accumulate over different numbers of passes, so only the pass that exchanges gradients is a step. A step
    # that is recorded has been counted already.
    elif not _ranks.accumulates() and not is_recorded():
        attach_current(head)
        head.sampler.advance()
        # An objective without Z̃ has no error to decide by.
        if examples is not None and estimates_log_z(head.objective) and (part := deciding_part(head.sampler)):
            # A table that is computed, such as a parametrised one, must save nothing for a backward pass: a checkpoint
            # would miss it in the recomputation. Measurements enable gradients where they need them.
            with torch.no_grad():
                part.begin(_step_clock(head, examples))


def probe_of(head: LearningHead) -> ErrorProbe:
    """Return the probe that decides, or only warns: the sampler's, or else the head's."""
    part = deciding_part(head.sampler)
    return head.own_probe if part is None else part.probe


def observe(
    head: LearningHead, examples: Examples, candidates: Candidates, loss: Tensor, probability: Callable[[], Tensor]
) -> None:
    """Measure the error of a training step if that is due, and show the outcome to the sampler.

    Args:
        head: the head of the step.
        examples: its batch.
        candidates: its draw.
        loss: its losses [B], without gradients.
        probability: returns [ΣK], see `Observation`.
    """
    if not torch.compiler.is_compiling():
        if not _ranks.accumulates():
            with torch.no_grad():
                if not is_recorded():
                    probe_step(head, [probe_of(head), *head.extra_probes], examples, candidates, loss)
                if head.sampler.learns:
                    head.sampler.observe(_observation(head, examples, candidates, loss, probability))
        return
    nothing, kind = candidates.excluded.new_empty(0), loss.device.type
    show_sampler(
        _clock,
        head.handle.number,
        [block.ids for block in candidates.blocks],
        [block.log_kappa for block in candidates.blocks],
        [nothing if block.order is None else block.order for block in candidates.blocks],
        candidates.excluded,
        probability() if head.sampler.learns and not candidates.is_exhaustive else loss[:0],
        loss,
        examples.hidden.detach(),
        examples.target,
        examples.valid,
        examples.exclude,
        None if examples.log_z is None else examples.log_z.detach(),
        examples.include,
        candidates.included,
        candidates.is_exhaustive,
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
    )


# A CUDA graph would replay the kernels of these operators without their Python.
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("manyclass::advance_sampler", mutates_args={"clock"}, tags=_TAGS)
def advance_sampler(clock: Tensor, handle: int) -> None:
    """Advance the sampler of the head with this handle."""
    clock.add_(1)
    head = owner_of(handle)
    if (recording := present()) is not None:
        recording.add_head(head, compiled=True)
    advance(head)


@advance_sampler.register_fake
def _(clock: Tensor, handle: int) -> None:
    pass


@torch.library.custom_op("manyclass::show_sampler", mutates_args={"clock"}, tags=_TAGS)
def show_sampler(
    clock: Tensor,
    handle: int,
    ids: list[Tensor],
    log_kappa: list[Tensor],
    order: list[Tensor],
    excluded: Tensor,
    probability: Tensor,
    loss: Tensor,
    hidden: Tensor,
    target: Tensor,
    valid: Tensor | None,
    exclude: Tensor | None,
    log_z: Tensor | None,
    include: Tensor | None,
    included: Tensor | None,
    is_exhaustive: bool,
    autocast: torch.dtype | None,
) -> None:
    """Show an outcome to the sampler of the head with this handle."""
    clock.add_(1)
    head = owner_of(handle)
    blocks = tuple(
        Block(i, kappa, None if len(sorting) == 0 else sorting)
        for i, kappa, sorting in zip(ids, log_kappa, order, strict=True)
    )
    examples = Examples(hidden, target, valid, None, exclude, log_z, target.shape, include)
    candidates = Candidates(blocks, excluded, None, head.num_classes, included, is_exhaustive)
    # A compiled graph runs its operators without the autocast that it was traced with.
    with torch.autocast(loss.device.type, dtype=autocast, enabled=autocast is not None):
        observe(head, examples, candidates, loss, lambda: probability)


@show_sampler.register_fake
def _(*arguments: object) -> None:
    pass


def _observation(
    head: LearningHead, examples: Examples, candidates: Candidates, loss: Tensor, probability: Callable[[], Tensor]
) -> Observation:
    @torch.no_grad()
    def trial(sampler: Sampler, seed: int) -> float:
        with fork_rng(examples.target.device), steady_scores(head):
            tried = losses_over(head, examples, _measured_draw(head, examples, sampler, seed))
            if candidates.is_exhaustive and not is_scorer(head):
                # The step's own losses are exact, so all examples can be compared without scoring all classes again.
                return mean_over_valid((tried.double() - loss.double()).square(), examples.valid)
            return mean_square_error(head, examples, tried, seed)

    return Observation(candidates, examples.hidden.detach(), probability, trial, _step_clock(head, examples))


def _step_clock(head: LearningHead, examples: Examples) -> StepClock:
    device = examples.target.device

    def seconds(sampler: Sampler) -> float:
        with fork_rng(device):
            return step_seconds(head, examples, lambda: _measured_draw(head, examples, sampler, 0))

    def exact() -> tuple[str | None, float]:
        with fork_rng(device):
            return exact_seconds(head, examples)

    return StepClock(device, seconds, exact)


def _measured_draw(head: LearningHead, examples: Examples, sampler: Sampler, seed: int) -> Candidates:
    """Draw for a measurement, on which the training must not depend: with a separate generator."""
    generator = torch.Generator(examples.target.device).manual_seed(seed)
    return draw_candidates(head, examples, head.objective, generator, attached=True, sampler=sampler)
