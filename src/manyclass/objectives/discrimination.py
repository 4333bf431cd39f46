"""Objectives that discriminate the target from candidates, which are taken as noise."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.forms import PairSum, target_log_kappa, weighted


class NegativeSampling:
    """Negative sampling (Mikolov et al. 2013), scaled as the paper does.

        loss = -log σ(s(target)) - 1/n Σ_d log(1 - σ(s(d)))
        γ(target) = 1 - σ(s(target)),  γ(d) = -σ(s(d)) / n

    κ only marks empty slots; without candidates the loss is 0.

    Args:
        mean: divide the candidates' sum by their number n, so that it weighs as much as the target's term; if False,
            keep the sum, as word2vec does.
    """

    keeps_hits = False
    normalised = False

    def __init__(self, *, mean: bool = True) -> None:
        self.form = PairSum("softplus", positive=True, mean=mean)

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return f"NegativeSampling(mean={self.form.mean})"


class NoiseContrastive(nn.Module):
    """Noise contrastive estimation (Gutmann & Hyvärinen 2010): the model p' = u / z against noise of expected count ν.

        loss = -log(p'(target) / (p'(target) + ν(target))) - Σ_d log(ν(d) / (p'(d) + ν(d))),  ν = 1/κ
        γ(target) = ν(target) / (p'(target) + ν(target)),  γ(d) = -p'(d) / (p'(d) + ν(d))

    Under `Importance(q, k)` ν is k q, the classic form. Noise ranges over all classes, so hits stay; with an empty
    draw only the target's term is left.

    Args:
        log_z: fixed or initial log z; `head(..., log_z=…)` adds one for each example.
        learn: whether log z is a parameter.
    """

    form = PairSum("softplus", kappa=True, positive=True, needs_candidates=False)
    keeps_hits = True
    normalised = True

    def __init__(self, log_z: float = 0.0, *, learn: bool = False) -> None:
        super().__init__()
        _check.number("log_z", log_z)
        self.log_z = nn.Parameter(torch.tensor(log_z, dtype=torch.float32)) if learn else float(log_z)

    def forward(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        target_score, scores = target_score - self.log_z, scores - self.log_z
        return self.form.loss(target_score, scores, candidates)

    def extra_repr(self) -> str:
        """Return the options."""
        learn = isinstance(self.log_z, nn.Parameter)
        return f"log_z={self.log_z.item() if isinstance(self.log_z, nn.Parameter) else self.log_z:g}, learn={learn}"


class BlackOut:
    """BlackOut: discriminates the target from each candidate within their weighted softmax (Ji et al. 2016).

        p̃(c) = κ_c u(c) / (κ(target) u(target) + Σ_d κ_d u(d)),  κ ∝ 1/Q
        loss = -log p̃(target) - Σ_d log(1 - p̃(d))

    γ is not within [-1, 1]: the target's may approach 2, a candidate's lies in (-2, 1). Without candidates the loss is
    0. It has neither of the two forms, so no kernel serves it.
    """

    form = None
    keeps_hits = False
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        target = target_score + target_log_kappa(candidates, scores.dtype)
        # Column 0 holds the target, so that a row is never empty.
        log_u = torch.cat([target.unsqueeze(1), weighted(scores, candidates)], 1)
        log_z = log_u.logsumexp(1, keepdim=True)
        # 1 - p̃ cancels if p̃ is near 1. Only the largest term can be, so its complement is summed directly.
        largest = log_u.argmax(1, keepdim=True)
        others = log_u.scatter(1, largest, -math.inf)
        alone = (others > -math.inf).sum(1, keepdim=True) == 0
        log_others = torch.where(alone, 0.0, others).logsumexp(1, keepdim=True)
        is_largest = torch.zeros_like(log_u, dtype=torch.bool).scatter_(1, largest, True)
        p = (log_u - log_z).exp().masked_fill(is_largest, 0.0)
        complement = torch.where(is_largest, log_others - log_z, torch.log1p(-p))
        return (log_z.squeeze(1) - target) - complement[:, 1:].sum(1)

    def __repr__(self) -> str:
        return "BlackOut()"
