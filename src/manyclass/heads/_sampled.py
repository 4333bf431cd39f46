"""The loss of a head with a sampler, the same for every kind of score."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.heads._batch import Batch
from manyclass.objectives import Likelihood, LogSumExp, Objective
from manyclass.samplers import LearningSampler, Sampler


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
    closed_form: Callable[[Batch, Candidates], Tensor | None] | None = None,
) -> Tensor:
    """Losses [B] of the head's objective over one draw of its sampler.

    Args:
        head, batch, generator: what is drawn for, and with what.
        closed_form: a faster way to the same losses, or to None where it does not apply.
    """
    if batch.log_z is not None and not head.objective.normalised:
        raise ValueError(f"`log_z` must be None for {head.objective!r}, which has no z, got a tensor")
    candidates = draw(head, batch, head.objective, generator)
    loss = None if closed_form is None else closed_form(batch, candidates)
    # Where it is NaN, the longer way knows why.
    if loss is None or (_check.reads_values(loss) and math.isnan(loss.detach().sum().item())):
        loss = candidate_loss(head, batch, candidates, observe=observer(head, candidates))
    return loss


def observer(head: SampledHead, candidates: Candidates) -> Callable[[Tensor], None] | None:
    """Who is to be told of κ u/Z̃ [B, K]; None: nobody, or there is no Z̃ to tell of."""
    form = head.objective.form
    sampler = head.sampler
    learns = isinstance(sampler, LearningSampler) and head.training and torch.is_grad_enabled()
    # What is learnt changes tables, which a compiled graph holds as they are.
    if not learns or torch.compiler.is_compiling() or not isinstance(form, LogSumExp) or not form.kappa:
        return None

    def observe(weighted: Tensor) -> None:
        assert isinstance(sampler, LearningSampler)
        rms = torch.linalg.vector_norm(weighted, dim=0) / math.sqrt(len(weighted))
        sampler.observe(candidates, rms * (-candidates.blocks[0].log_kappa[0]).exp())

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
