"""Objectives that tell the target from candidates, taken as noise."""

import math

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.forms import PairSum, target_log_kappa, weighted


class NegativeSampling:
    """-log σ(s(target)) - 1/n Σ_d log(1 - σ(s(d))) (Mikolov et al. 2013), scaled as the paper does.

        γ(target) = 1 - σ(s(target)),  γ(d) = -σ(s(d)) / n

    κ tells empty slots and nothing else; with no candidates the loss is 0.

    Args:
        mean: divide the candidates' sum by their number n, so that it weighs as much as the target; False: word2vec's
            undivided sum.
    """

    keeps_hits = False
    normalised = False

    def __init__(self, *, mean: bool = True) -> None:
        self.form = PairSum("softplus", positive=True, mean=mean)

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return f"NegativeSampling(mean={self.form.mean})"


class NoiseContrastive(nn.Module):
    """Noise contrastive estimation (Gutmann & Hyvärinen 2010): the model p' = u / z against noise expected ν times.

        loss = -log(p'(target) / (p'(target) + ν(target))) - Σ_d log(ν(d) / (p'(d) + ν(d))),  ν = 1/κ
        γ(target) = ν(target) / (p'(target) + ν(target)),  γ(d) = -p'(d) / (p'(d) + ν(d))

    Under `Importance(q, k)` ν is k q, the classic form. Noise ranges over all classes, so hits stay; with an empty
    draw the target's term alone is left.

    Args:
        log_z: log z, fixed or where learning starts; `head(..., log_z=…)` adds one of each example's own.
        learn: whether log z is a parameter.
    """

    form = PairSum("softplus", kappa=True, positive=True, needs_candidates=False)
    keeps_hits = True
    normalised = True

    def __init__(self, log_z: float = 0.0, *, learn: bool = False) -> None:
        super().__init__()
        value = torch.tensor(_check.number("log_z", log_z), dtype=torch.float32)
        self.log_z = nn.Parameter(value) if learn else value.item()

    def forward(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        target_score, scores = target_score - self.log_z, scores - self.log_z
        return self.form.loss(target_score, scores, candidates)

    def extra_repr(self) -> str:
        learn = isinstance(self.log_z, nn.Parameter)
        return f"log_z={self.log_z.item() if isinstance(self.log_z, nn.Parameter) else self.log_z:g}, learn={learn}"


class BlackOut:
    """Discriminates the target from each candidate within their weighted softmax (Ji et al. 2016).

        p̃(c) = κ_c u(c) / (κ(target) u(target) + Σ_d κ_d u(d)),  κ ∝ 1/Q
        loss = -log p̃(target) - Σ_d log(1 - p̃(d))

    γ is not within [-1, 1]: the target's may approach 2, a candidate's lies in (-2, 1). With no candidates the loss
    is 0. It has neither of the two forms, so it stays eager.
    """

    form = None
    keeps_hits = False
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        target = target_score + target_log_kappa(candidates, scores.dtype)
        # The target in column 0, so that a row is never empty.
        log_u = torch.cat([target.unsqueeze(1), weighted(scores, candidates)], 1)
        log_z = log_u.logsumexp(1, keepdim=True)
        # 1 - p̃ cancels where p̃ is near 1, which only the largest term can be: its complement is summed by itself.
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
