"""The loss of a head with a sampler, the same for every kind of score."""

import math
from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.heads._batch import Batch
from manyclass.objectives import Likelihood, LogSumExp, Objective
from manyclass.samplers import BudgetedSampler, LearningSampler, Sampler

_TOLD = 256  # examples that a learning sampler is told of, at most
_PROBED = 64
_PROBE_DRAWS = 4


class SampledHead(Protocol):
    """A head whose loss is one choice of sampler and objective."""

    @property
    def num_classes(self) -> int: ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def objective(self) -> Objective: ...

    @property
    def training(self) -> bool: ...

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Scores of the targets [B] and of the candidates [B, ΣK], -inf where excluded."""
        ...


def draw(head: SampledHead, batch: Batch, objective: Objective, generator: torch.Generator | None = None) -> Candidates:
    """Candidates for a batch: the target is none of them, unless the objective keeps hits."""
    exclude = batch.exclude
    if not objective.keeps_hits:
        own = batch.target.unsqueeze(1)
        exclude = own if exclude is None else torch.cat([own, exclude], 1)
    elif exclude is None:
        exclude = batch.target.new_empty(len(batch.target), 0)
    if head.sampler.device is not None:
        _check.device("sampler", batch.target, head.sampler.device)
    return head.sampler.draw(batch.target, exclude, hidden=batch.hidden.detach(), generator=generator)


def sampled_loss(
    head: SampledHead,
    batch: Batch,
    generator: torch.Generator | None,
    *,
    closed_form: Callable[[Batch, Candidates], tuple[Tensor, Tensor] | None] | None = None,
) -> Tensor:
    """Losses [B] of the head's objective over one draw of its sampler.

    Args:
        head, batch, generator: what is drawn for, and with what.
        closed_form: a faster way to the same losses and to ∂loss/∂s [B, K], or to None where it does not apply.
    """
    if batch.log_z is not None and not head.objective.normalised:
        raise ValueError(f"`log_z` must be None for {head.objective!r}, which has no z, got a tensor")
    candidates = draw(head, batch, head.objective, generator)
    found = None if closed_form is None else closed_form(batch, candidates)
    observe = observer(head, candidates)
    # On NaN, rerun eagerly: that path names the bad input.
    if found is None or (_check.reads_values(found[0]) and math.isnan(found[0].detach().sum().item())):
        loss = candidate_loss(head, batch, candidates, observe=observe)
    else:
        loss, score_gradient = found
        if observe is not None:
            observe(score_gradient)
    sampler = head.sampler
    if _trains_log_z(head) and _is_budgeted(sampler) and sampler.due():
        sampler.take_error(error_of_log_z(head, batch, generator))
    return loss


# As isinstance would say, which asks for every member of a protocol at each step, for 30 µs.
def _is_budgeted(sampler: Sampler) -> TypeGuard[BudgetedSampler]:
    return hasattr(sampler, "take_error")


def _is_learning(sampler: Sampler) -> TypeGuard[LearningSampler]:
    return hasattr(sampler, "observe")


def _trains_log_z(head: SampledHead) -> bool:
    """Whether a sampler may learn from this step: there is a Z̃, and it is for training."""
    form = head.objective.form
    # What is learnt changes tables, which a compiled graph holds as they are.
    if torch.compiler.is_compiling() or not (head.training and torch.is_grad_enabled()):
        return False
    return isinstance(form, LogSumExp) and form.kappa


@torch.no_grad()
def error_of_log_z(head: SampledHead, batch: Batch, generator: torch.Generator | None) -> float:
    """The root-mean-square error of log Z̃ over a few examples, from how far draws differ: no pass over all classes.

    NaN where all of these examples are ignored. Waits for the device.
    """
    few = batch.every(-(-len(batch.target) // _PROBED))
    losses = []
    for _ in range(_PROBE_DRAWS):
        candidates = draw(head, few, head.objective, generator)
        # log Z̃ less the target's score, which is the same in all of them.
        losses.append(head.objective(*head.candidate_scores(few.hidden, few.target, candidates), candidates))
    variance = torch.stack(losses).double().var(0)
    return math.sqrt(variance.mean() if few.valid is None else variance[few.valid].mean())


def observer(head: SampledHead, candidates: Candidates) -> Callable[[Tensor], None] | None:
    """Who is to be told of κ u/Z̃ [B, K]; None: nobody, or there is no Z̃ to tell of."""
    if not _trains_log_z(head):
        return None
    learner = head.sampler.sampler if _is_budgeted(head.sampler) else head.sampler
    if not _is_learning(learner):
        return None

    def observe(weighted: Tensor) -> None:
        # Some examples tell as much in the long run, and all of them would cost a quarter of the step.
        some = weighted[:: -(-len(weighted) // _TOLD)]
        rms = some.square().mean(0).sqrt_()
        learner.observe(candidates, rms * (-candidates.blocks[0].log_kappa[0]).exp())

    return observe


def candidate_loss(
    head: SampledHead, batch: Batch, candidates: Candidates, *, observe: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Losses [B] of the head's objective over these candidates; `observe` is told of κ u/Z̃ [B, K]."""
    target_score, scores = head.candidate_scores(batch.hidden, batch.target, candidates)
    if batch.log_z is not None:
        target_score, scores = target_score - batch.log_z, scores - batch.log_z.unsqueeze(1)
    loss: Tensor = head.objective(target_score, scores, candidates)
    _check.finite_loss(loss, hidden=batch.hidden, log_z=batch.log_z, target_score=target_score, scores=scores)
    if observe is not None:
        with torch.no_grad():
            log_z = (loss + target_score).unsqueeze(1)
            observe((scores + candidates.log_kappa(scores.dtype) - log_z).exp())
    return loss


@torch.no_grad()
def approximate_log_likelihood(head: SampledHead, batch: Batch, generator: torch.Generator | None) -> Tensor:
    """log p̃(target) [B] by the paper's estimate, whatever objective the head trains with."""
    likelihood = Likelihood()
    candidates = draw(head, batch, likelihood, generator)
    return -likelihood(*head.candidate_scores(batch.hidden, batch.target, candidates), candidates)
