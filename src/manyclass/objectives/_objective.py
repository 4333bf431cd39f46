"""What every objective is, and the two forms that most of them take.

A form says in data what a loss does with its scores. Kernels and shards implement the two forms and never ask for
the name of an objective; the functions here are their eager reference.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass.candidates import Candidates


@dataclass(frozen=True)
class LogSumExp:
    """loss = -s(target) + log Z̃ with Z̃ = [target] exp s(target) + Σ_j κ_j exp s_j.

    Args:
        target: whether the target is summed explicitly.
        kappa: whether slots are weighted by κ; if not, each counts once.
    """

    target: bool
    kappa: bool


@dataclass(frozen=True)
class PairSum:
    """loss = softplus(-t) + Σ_j φ(s_j + [kappa] log κ_j - [paired] t + margin), where
    t = s(target) + [kappa] log κ(target), and the first term is there if `positive`.

    Args:
        activation: φ.
        margin: a number, or None: log(C - 1).
        paired: whether the target's score is taken from each candidate's.
        kappa: whether log κ is added to the scores.
        positive: whether the target has a term of its own.
        mean: whether the sum over candidates is divided by their number.
        needs_candidates: whether the loss of an example with no candidates is 0, the positive term included.
    """

    activation: Literal["softplus", "relu"]
    margin: float | None = 0.0
    paired: bool = False
    kappa: bool = False
    positive: bool = False
    mean: bool = False
    needs_candidates: bool = True

    def margin_of(self, num_classes: int) -> float:
        # Of one class alone log(C - 1) would be log 0; it has no candidates, so any margin will do.
        return math.log(max(num_classes - 1, 1)) if self.margin is None else self.margin


class Objective(Protocol):
    """Turns scores and κ into one loss per example; its gradient with regard to the scores is -γ.

    Attributes:
        form: one of the two forms, or None: such an objective has its eager reference alone.
        keeps_hits: whether a drawn class that is the target stays a candidate.
        normalised: whether the model's scores are taken as log-probabilities up to a known log z, so that
            `head(..., log_z=…)` means something.
    """

    @property
    def form(self) -> LogSumExp | PairSum | None: ...

    @property
    def keeps_hits(self) -> bool: ...

    @property
    def normalised(self) -> bool: ...

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Losses [B] from target scores [B] and scores [B, ΣK] that are -inf where a class is excluded."""
        ...


def weighted(scores: Tensor, candidates: Candidates) -> Tensor:
    """s + log κ, -inf for empty slots whatever their score."""
    log_kappa = candidates.log_kappa(scores.dtype)
    # An infinite score in an empty slot would make NaN of the sum.
    return (scores + log_kappa).masked_fill(log_kappa.isneginf(), -math.inf)


def unweighted(scores: Tensor, candidates: Candidates) -> Tensor:
    """s, -inf for empty slots."""
    return scores.masked_fill(candidates.log_kappa(scores.dtype).isneginf(), -math.inf)


def target_log_kappa(candidates: Candidates, dtype: torch.dtype) -> Tensor:
    if candidates.target_log_kappa is None:
        raise ValueError(
            "`sampler` must know how often a target is drawn for an objective that weighs the target by κ, got one "
            "that does not: give WithExplicit a sampler for the rest"
        )
    return candidates.target_log_kappa().to(dtype)


def log_sum_exp(form: LogSumExp, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
    log_u = weighted(scores, candidates) if form.kappa else unweighted(scores, candidates)
    if form.target:
        return torch.cat([target_score.unsqueeze(1), log_u], 1).logsumexp(1) - target_score
    # An empty draw has no Z̃: loss and gradient are 0. The inner `where` keeps NaN out of the gradient. (A score that is
    # NaN is no empty slot, and shows.)
    drawn = (log_u != -math.inf).any(1)
    log_z = torch.where(drawn.unsqueeze(1), log_u, 0.0).logsumexp(1)
    return torch.where(drawn, log_z - target_score, 0.0)


def pair_sum(form: PairSum, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
    log_u = weighted(scores, candidates) if form.kappa else unweighted(scores, candidates)
    if form.kappa:
        target_score = target_score + target_log_kappa(candidates, scores.dtype)
    x = log_u + form.margin_of(candidates.num_classes)
    if form.paired:
        x = x - target_score.unsqueeze(1)
    # φ(-inf) is 0 with gradient 0 for both: empty slots add nothing.
    loss = (F.softplus(x) if form.activation == "softplus" else F.relu(x)).sum(1)
    number = (log_u != -math.inf).sum(1)
    if form.mean:
        loss = loss / number.clamp(min=1)
    if form.positive:
        positive = F.softplus(-target_score)
        loss = loss + (torch.where(number > 0, positive, 0.0) if form.needs_candidates else positive)
    return loss
