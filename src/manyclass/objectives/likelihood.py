"""Objectives that approximate the log likelihood; they differ in the approximation of its normaliser Z."""

from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import LogSumExp


class Likelihood:
    """The paper's objective: the target is summed explicitly, the other classes by their candidates.

        L̃ = s(target) - log Z̃,  Z̃ = u(target) + Σ_d κ_d u(d)
        γ̃(c) = [c = target] - p̃(c),  p̃(target) = u(target) / Z̃,  p̃(d) = κ_d u(d) / Z̃

    γ̃ lies in [-1, 1] and never has the wrong sign. Without candidates the loss is 0.

    Example:
        >>> import torch
        >>> from manyclass.samplers import Exhaustive
        >>> target = torch.tensor([1])
        >>> candidates = Exhaustive(3)(target, exclude=target.unsqueeze(1))
        >>> scores = torch.tensor([[0.0, -torch.inf, 0.0]])
        >>> Likelihood()(torch.tensor([0.0]), scores, candidates).exp()
        tensor([3.])
    """

    form = LogSumExp(target=True, kappa=True)
    keeps_hits = False
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return "Likelihood()"


class PlainImportance:
    """Plain importance sampling (Bengio & Senécal 2003): all of Z is sampled, the target included.

        L̃ = s(target) - log Z̃,  Z̃ = Σ_d κ_d u(d)
        γ̃(c) = [c = target] - Σ_{d = c} κ_d u(d) / Z̃

    If the draw misses the target, Z̃ may be below u(target): the loss is then below 0 and the plug-in
    1 - u(target) / Z̃ may be below -1. With an empty draw the loss is 0.
    """

    form = LogSumExp(target=False, kappa=True)
    keeps_hits = True
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return "PlainImportance()"


class SubsetSoftmax:
    """Softmax over the target and the candidates, each counted once (Jean et al. 2015).

        L̃ = s(target) - log(u(target) + Σ_d u(d))
        γ̃(c) = [c = target] - u(c) / (u(target) + Σ_d u(d))

    κ only marks empty slots, so the sum is biased towards 0; a class drawn twice counts twice. With
    `WithExplicit(None, …)` the subset is chosen in advance. Without candidates the loss is 0.
    """

    form = LogSumExp(target=True, kappa=False)
    keeps_hits = False
    normalised = False

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return "SubsetSoftmax()"
