"""Objectives that the paper names and nobody should train with: they have no use outside the lab."""

import math

import torch
from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import weighted
from manyclass.objectives import PlainImportance
from manyclass.samplers import Importance


class TaylorInverse:
    """1/Z by a truncated Taylor expansion (Booth 2007), each factor from a draw of its own.

        1/Z ≈ 1/a Σ_i Π_{j ≤ i} (1 - Z̃_j / a),  a = Z̃_0
        γ(target) = 1 - u(target) / Z,  γ(d) = -κ_d u(d) / Z, d from the last draw

    All Z̃_j are independent, so the product of their expectations is (1 - Z/a)^i. Neither γ is bounded. The loss is one
    whose gradient is -γ, and means nothing else.

    Args:
        draws: how many equal and independent draws the slots hold, at least 3.
    """

    form = None
    keeps_hits = False
    normalised = False

    def __init__(self, draws: int) -> None:
        self._draws = draws

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        gamma_target, gamma = self.gamma(target_score.detach(), scores.detach(), candidates)
        last = scores[:, -gamma.shape[1] :]
        terms = torch.where(gamma == 0, 0.0, gamma * last)
        return -(gamma_target * target_score + terms.sum(1))

    def gamma(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """γ of the target [B] and of the last draw's slots [B, K]."""
        # κ is that of all draws together; each of them alone stands for as many classes.
        log_u = weighted(scores, candidates).double() + math.log(self._draws)
        log_u = log_u.unflatten(1, (self._draws, -1))
        own = target_score.double().unsqueeze(1)
        log_z = torch.logaddexp(log_u.logsumexp(2), own)
        ratio = (log_z[:, 1:-1] - log_z[:, :1]).exp()
        series = 1 + (1 - ratio).cumprod(1).sum(1, keepdim=True)
        inverse = series * (-log_z[:, :1]).exp()
        gamma_target, gamma = 1 - own.exp() * inverse, -log_u[:, -1].exp() * inverse
        return gamma_target.squeeze(1).to(scores.dtype), gamma.to(scores.dtype)


class UpperBound:
    """The Discussion's bound, Z ≤ C + E[Σ s_i (exp(v_i / b_i) - 1)], with a Bernoulli sample for its expectation.

    The target has b = 1. Scores are divided by b before the exponential is taken, so that rare classes dominate.
    """

    form = None
    keeps_hits = False
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        kappa = candidates.log_kappa(scores.dtype).exp()
        present = (kappa > 0) & (scores != -math.inf)
        # What is neither the target nor drawn counts 1.
        rest = (candidates.num_classes - 1 - present.sum(1)).to(scores.dtype).log()
        powers = torch.where(present, kappa * torch.where(present, scores, 0.0), -math.inf)
        log_bound = torch.cat([target_score.unsqueeze(1), rest.unsqueeze(1), powers], 1).logsumexp(1)
        return log_bound - target_score


class AdaptedImportance:
    """Plain importance sampling with q adapted to the model, in the spirit of Bengio & Senécal (2008).

    q is half the sampler's own weights and half a running estimate, per class, of the model's mean probability, from
    the self-normalised weights of the classes that were drawn.

    Args:
        sampler: whose table follows.
        forget: the share of the estimate that a step replaces.
        every: how many steps lie between changes of the table.
    """

    form = None
    keeps_hits = True
    normalised = False

    def __init__(self, sampler: Importance, *, forget: float = 0.01, every: int = 10) -> None:
        self._sampler, self._forget, self._every = sampler, forget, every
        own = sampler.source.read()
        self._own = own / own.sum()
        self._estimate = self._own.clone()
        self._steps = 0
        self._plain = PlainImportance()

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        with torch.no_grad():
            p = weighted(scores, candidates).double().softmax(1) / len(scores)
            self._estimate.mul_(1 - self._forget).index_add_(0, candidates.ids().flatten(), self._forget * p.flatten())
        self._steps += 1
        if self._steps % self._every == 0:
            self._sampler.table.rebuild(self._own + self._estimate)
        return self._plain(target_score, scores, candidates)
