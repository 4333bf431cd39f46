"""The draw of a head, and the two calls of a training step that change its sampler.

A compiled graph cannot hold those calls: it would run their Python once, when it is traced. There they are opaque
operators. Each is said to write to a clock, so that the compiler neither removes nor repeats it.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from manyclass import _ranks
from manyclass._context import is_transformed
from manyclass._handle import Handle, owner_of
from manyclass.candidates import Block, Candidates
from manyclass.heads.examples import Examples
from manyclass.objectives import Objective
from manyclass.samplers import Observation, Sampler, draw_including

PROBE_EXAMPLES = 64
PROBE_DRAWS = 4
# On the CPU: a CUDA graph, which would replay the kernels without the Python, is then not made.
_clock = torch.zeros((), dtype=torch.int64, device="cpu")


class LearningHead(Protocol):
    """A head whose sampler follows its training steps."""

    @property
    def handle(self) -> Handle:
        """The number of this head in compiled graphs."""
        ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def objective(self) -> Objective: ...

    @property
    def class_vectors(self) -> tuple[Tensor | None, Tensor | None]:
        """The class vectors and biases to attach to the sampler, as they are; None if there are none."""
        ...

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return scores of the targets [B] and of the candidates [B, ΣK], -inf where excluded."""
        ...


def draw_candidates(
    head: LearningHead,
    examples: Examples,
    objective: Objective,
    generator: torch.Generator | None = None,
    *,
    attached: bool = False,
) -> Candidates:
    """Draw candidates for examples, with their included classes; targets are excluded unless the objective keeps hits.

    Args:
        head: has the sampler.
        examples: the batch.
        objective: decides whether targets are excluded.
        generator: for the draw; None: torch's global generator.
        attached: whether the present class vectors are attached already.
    """
    exclude = examples.exclude
    if not objective.keeps_hits:
        target = examples.target.unsqueeze(1)
        exclude = target if exclude is None else torch.cat([target, exclude], 1)
    elif exclude is None:
        exclude = examples.target.new_empty(len(examples.target), 0)
    if not attached and not is_transformed():
        _attach_current(head)
    if head.sampler.device not in (None, examples.target.device):
        raise ValueError(f"`sampler` must be on {examples.target.device}, got {head.sampler.device}")
    hidden = examples.hidden.detach()
    return draw_including(head.sampler, examples.target, examples.include, exclude, hidden=hidden, generator=generator)


def _attach_current(head: LearningHead) -> None:
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


def advance(head: LearningHead) -> None:
    """Let the sampler count a training step, before its draw."""
    if torch.compiler.is_compiling():
        advance_sampler(_clock, head.handle.number)
    # Ranks may accumulate over different numbers of passes, so only the pass that exchanges gradients is a step.
    elif not _ranks.accumulates():
        _attach_current(head)
        head.sampler.advance()


def observe(head: LearningHead, examples: Examples, candidates: Candidates, probability: Callable[[], Tensor]) -> None:
    """Show the sampler the outcome of a training step.

    Args:
        head: the head of the step.
        examples: its batch.
        candidates: its draw.
        probability: returns [K], see `Observation`.
    """
    if not torch.compiler.is_compiling():
        if not _ranks.accumulates():
            outcome = Observation(
                candidates,
                probability,
                lambda seed: rmse_log_z(head, examples, seed=seed),
                examples.hidden.detach(),
            )
            head.sampler.observe(outcome)
        return
    nothing = candidates.excluded.new_empty(0)
    show_sampler(
        _clock,
        head.handle.number,
        [block.ids for block in candidates.blocks],
        [block.log_kappa for block in candidates.blocks],
        [nothing if block.order is None else block.order for block in candidates.blocks],
        candidates.excluded,
        probability(),
        examples.hidden.detach(),
        examples.target,
        examples.valid,
        examples.exclude,
        None if examples.log_z is None else examples.log_z.detach(),
        examples.include,
        candidates.included,
    )


@torch.library.custom_op("manyclass::advance_sampler", mutates_args={"clock"})
def advance_sampler(clock: Tensor, handle: int) -> None:
    """Advance the sampler of the head with this handle."""
    clock.add_(1)
    advance(owner_of(handle))


@advance_sampler.register_fake
def _(clock: Tensor, handle: int) -> None:
    pass


@torch.library.custom_op("manyclass::show_sampler", mutates_args={"clock"})
def show_sampler(
    clock: Tensor,
    handle: int,
    ids: list[Tensor],
    log_kappa: list[Tensor],
    order: list[Tensor],
    excluded: Tensor,
    probability: Tensor,
    hidden: Tensor,
    target: Tensor,
    valid: Tensor | None,
    exclude: Tensor | None,
    log_z: Tensor | None,
    include: Tensor | None,
    included: Tensor | None,
) -> None:
    """Show an outcome to the sampler of the head with this handle."""
    clock.add_(1)
    head = owner_of(handle)
    blocks = tuple(
        Block(i, kappa, None if len(sorting) == 0 else sorting)
        for i, kappa, sorting in zip(ids, log_kappa, order, strict=True)
    )
    examples = Examples(hidden, target, valid, None, exclude, log_z, target.shape, include)
    candidates = Candidates(blocks, excluded, None, head.num_classes, included)
    observe(head, examples, candidates, lambda: probability)


@show_sampler.register_fake
def _(*arguments: object) -> None:
    pass


@torch.no_grad()
def rmse_log_z(head: LearningHead, examples: Examples, *, seed: int) -> float:
    """Return the root-mean-square error of log Z̃ on a few examples, from the spread of a few draws.

    It needs no pass over all classes, and synchronises with the device. The draws have a separate generator, so that a
    training does not depend on how often it is measured. NaN if all of these examples are ignored.
    """
    generator = torch.Generator(examples.target.device).manual_seed(seed)
    few = examples.every(-(-len(examples.target) // PROBE_EXAMPLES))
    losses = []
    for _ in range(PROBE_DRAWS):
        candidates = draw_candidates(head, few, head.objective, generator)
        # The loss is log Z̃ minus the target's score, which is the same in all draws.
        losses.append(head.objective(*head.candidate_scores(few.hidden, few.target, candidates), candidates))
    variance = torch.stack(losses).double().var(0)
    return math.sqrt(variance.mean() if few.valid is None else variance[few.valid].mean())
