"""Objectives that the paper mentions but that train badly, so they are kept out of `manyclass.objectives`."""

import math

import torch
from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import weighted
from manyclass.objectives import PlainImportance
from manyclass.samplers import Importance


class TaylorInverse:
    """Estimate of 1/Z by a truncated Taylor expansion (Booth 2007), with an independent draw for each factor.

        1/Z ≈ 1/a Σ_i Π_{j ≤ i} (1 - Z̃_j / a),  a = Z̃_0
        γ(target) = 1 - u(target) / Z,  γ(d) = -κ_d u(d) / Z, d from the last draw

    All Z̃_j are independent, so the product of their expectations is (1 - Z/a)^i. Neither γ is bounded. Only the loss's
    gradient, -γ, is meaningful; its value is not.

    Args:
        draws: number of equal and independent draws that the slots hold, at least 3.
    """

    form = None
    keeps_hits = False
    normalised = False

    def __init__(self, draws: int) -> None:
        self._draws = draws

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return a loss [B] with gradient -γ."""
        gamma_target, gamma = self.gamma(target_score.detach(), scores.detach(), candidates)
        last = scores[:, -gamma.shape[1] :]
        terms = torch.where(gamma == 0, 0.0, gamma * last)
        return -(gamma_target * target_score + terms.sum(1))

    def gamma(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return γ of the target [B] and of the last draw's slots [B, K].

        Raises:
            ValueError: there are included classes, which belong to no draw.
        """
        if candidates.included is not None:
            raise ValueError(f"`include` must be None for {type(self).__name__}, got classes that belong to no draw")
        # κ counts all draws together, so each draw alone needs κ times the number of draws.
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
    """Upper bound of the paper's Discussion, Z ≤ C + E[Σ s_i (exp(v_i / b_i) - 1)], from one Bernoulli sample.

    The target has b = 1. Scores are divided by b before the exponential, so rare classes dominate.
    """

    form = None
    keeps_hits = False
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return the bound of the negative log likelihood [B]."""
        kappa = candidates.log_kappa(scores.dtype).exp()
        present = (kappa > 0) & (scores != -math.inf)
        # Every class that is neither the target nor drawn contributes 1.
        rest = (candidates.num_classes - 1 - present.sum(1)).to(scores.dtype).log()
        powers = torch.where(present, kappa * torch.where(present, scores, 0.0), -math.inf)
        log_bound = torch.cat([target_score.unsqueeze(1), rest.unsqueeze(1), powers], 1).logsumexp(1)
        return log_bound - target_score


class AdaptedImportance:
    """Plain importance sampling with q adapted to the model, in the spirit of Bengio & Senécal (2008).

    q is half the sampler's initial weights and half a running estimate, per class, of the model's mean probability,
    from the self-normalised weights of the classes drawn.

    Args:
        sampler: the sampler whose table is updated.
        forget: fraction of the estimate that a step replaces.
        every: steps between updates of the table.
    """

    form = None
    keeps_hits = True
    normalised = False

    def __init__(self, sampler: Importance, *, forget: float = 0.01, every: int = 10) -> None:
        self._sampler, self._forget, self._every = sampler, forget, every
        weights = sampler.source.read()
        self._initial = weights / weights.sum()
        self._estimate = self._initial.clone()
        self._steps = 0
        self._plain = PlainImportance()

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return the loss [B], and update q in every `every`-th call."""
        with torch.no_grad():
            p = weighted(scores, candidates).double().softmax(1) / len(scores)
            self._estimate.mul_(1 - self._forget).index_add_(0, candidates.ids().flatten(), self._forget * p.flatten())
        self._steps += 1
        if self._steps % self._every == 0:
            self._sampler.set_weights(self._initial + self._estimate)
        return self._plain(target_score, scores, candidates)
