"""Two forms that most losses take, as data: an objective chooses one, and kernels need not know the objective.

`loss` of a form is its eager reference; if the classes are divided among processes, each gives its part of the sums.
A kernel takes the form itself and, beside the tables, their `Similarity`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass.candidates import Candidates

TargetTransform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Similarity:
    """Score of a class vector w and a hidden vector h: w · h, or scale · cos(w, h).

    Args:
        name: "dot" or "cosine".
        scale: factor of the cosine; a dot product has none.
    """

    name: str = "dot"
    scale: float = 1.0


DOT = Similarity()


@dataclass(frozen=True)
class LogSumExp:
    """Log-sum-exp form: loss = -t + log Z̃ with Z̃ = [target] exp t + Σ_j κ_j exp s_j and t = s(target).

    Args:
        target: whether the target is summed explicitly.
        kappa: whether slots are weighted by κ; if not, each counts once.
        target_transform: function from the targets' scores [B] to t [B], such as a margin; None: t = s(target).
    """

    target: bool
    kappa: bool
    target_transform: TargetTransform | None = None

    def loss(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B] from target scores [B] and scores [B, ΣK] that are -inf where a class is excluded."""
        target_score = transformed(self, target_score)
        log_u = weighted(scores, candidates) if self.kappa else unweighted(scores, candidates)
        if candidates.shard is not None:
            # A column for each process, with the sum of its slots.
            log_u = candidates.shard.stacked(log_sum_exp(log_u)).T
        if self.target:
            return torch.cat([target_score.unsqueeze(1), log_u], 1).logsumexp(1) - target_score
        # An empty draw has no Z̃: loss and gradient are 0.
        log_z = log_sum_exp(log_u)
        return torch.where(log_z != -math.inf, log_z - target_score, 0.0)


@dataclass(frozen=True)
class PairSum:
    """Pair-sum form: loss = [positive] softplus(-t) + Σ_j φ(s_j + [kappa] log κ_j - [paired] t + margin).

    Here t = s(target) + [kappa] log κ(target).

    Args:
        activation: φ.
        margin: a number, or None: log(C - 1).
        paired: whether the target's score is subtracted from each candidate's.
        kappa: whether log κ is added to the scores.
        positive: whether the loss includes the target's term softplus(-t).
        mean: whether the sum over candidates is divided by their number.
        needs_candidates: whether the loss of an example without candidates is 0, the target's term included.
        target_transform: function applied to the targets' scores [B] before log κ is added; None: identity.
    """

    activation: Literal["softplus", "relu"]
    margin: float | None = 0.0
    paired: bool = False
    kappa: bool = False
    positive: bool = False
    mean: bool = False
    needs_candidates: bool = True
    target_transform: TargetTransform | None = None

    def margin_of(self, num_classes: int) -> float:
        """Return the margin for C classes."""
        # With C = 1, log(C - 1) would be log 0. There are no candidates then, so any margin will do.
        return math.log(max(num_classes - 1, 1)) if self.margin is None else self.margin

    def loss(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B] from target scores [B] and scores [B, ΣK] that are -inf where a class is excluded."""
        target_score = transformed(self, target_score)
        log_u = weighted(scores, candidates) if self.kappa else unweighted(scores, candidates)
        if self.kappa:
            target_score = target_score + target_log_kappa(candidates, scores.dtype)
        x = log_u + self.margin_of(candidates.num_classes)
        shard = candidates.shard
        if self.paired:
            x = x - (target_score if shard is None else shard.enter(target_score)).unsqueeze(1)
        # φ(-inf) is 0 with gradient 0 for both, so empty slots add nothing.
        loss = (F.softplus(x) if self.activation == "softplus" else F.relu(x)).sum(1)
        number = (log_u != -math.inf).sum(1)
        if shard is not None:
            loss, number = shard.total(torch.stack([loss, number.to(loss.dtype)]))
        if self.mean:
            loss = loss / number.clamp(min=1)
        if self.positive:
            positive = F.softplus(-target_score)
            loss = loss + (torch.where(number > 0, positive, 0.0) if self.needs_candidates else positive)
        return loss


Form = LogSumExp | PairSum


def is_cross_entropy(form: Form, *, keeps_hits: bool) -> bool:
    """Return True if the loss over all classes with κ = 1 is the cross entropy: the target is summed once."""
    return isinstance(form, LogSumExp) and form.target_transform is None and form.target != keeps_hits


def log_sum_exp(log_u: Tensor) -> Tensor:
    """Return the logarithm of Σ exp over the columns of [B, K], -inf with gradient 0 where all are -inf.

    NaN is no empty slot, so it reaches the result.
    """
    some = (log_u != -math.inf).any(1)
    # The inner `where` keeps NaN out of the gradient.
    log_sum = torch.where(some.unsqueeze(1), log_u, 0.0).logsumexp(1)
    return torch.where(some, log_sum, -math.inf)


def transformed(form: Form, target_score: Tensor) -> Tensor:
    """Return the targets' scores [B] after the transform of the form, if it has one."""
    return target_score if form.target_transform is None else form.target_transform(target_score)


def weighted(scores: Tensor, candidates: Candidates) -> Tensor:
    """Return s + log κ, -inf for empty slots whatever their score."""
    log_kappa = candidates.log_kappa(scores.dtype)
    # The sum of an infinite score and the log κ of an empty slot would be NaN.
    return (scores + log_kappa).masked_fill(log_kappa.isneginf(), -math.inf)


def unweighted(scores: Tensor, candidates: Candidates) -> Tensor:
    """Return s, -inf for empty slots."""
    return scores.masked_fill(candidates.log_kappa(scores.dtype).isneginf(), -math.inf)


def target_log_kappa(candidates: Candidates, dtype: torch.dtype) -> Tensor:
    """Return log κ of the targets [B].

    Raises:
        ValueError: the sampler does not know how often a target is drawn.
    """
    if candidates.target_log_kappa is None:
        raise ValueError(
            "`sampler` must know how often a target is drawn for an objective that weighs the target by κ, got one "
            "that does not: give WithExplicit a sampler for the rest"
        )
    return candidates.target_log_kappa().to(dtype)
