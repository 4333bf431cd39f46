"""Objectives that train the target to outscore the candidates by a margin."""

from torch import Tensor

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.forms import PairSum


class LogisticRanking:
    """Logistic ranking: the mean over candidates d of -log σ(s(target) - s(d) - margin).

        γ(c) = 1/n Σ_d (1 - σ(s(target) - s(d) - margin)) ([c = target] - [c = d])

    With the default margin log(C - 1) and one candidate drawn uniformly it equals the paper's likelihood. κ only marks
    empty slots; without candidates the loss is 0.

    Args:
        margin: a number, or None: log(C - 1).
    """

    keeps_hits = False
    normalised = False

    def __init__(self, margin: float | None = None) -> None:
        margin = None if margin is None else _check.number("margin", margin)
        self.form = PairSum("softplus", margin, paired=True, mean=True)

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return f"LogisticRanking(margin={self.form.margin})"


class HingeRanking:
    """Hinge ranking (Collobert & Weston 2008): the mean over candidates d of max(0, margin - s(target) + s(d)).

        γ(c) = 1/n Σ_d [s(target) - s(d) < margin] ([c = target] - [c = d])

    γ is 0 at the kink. κ only marks empty slots; without candidates the loss is 0.

    Args:
        margin: a number.
    """

    keeps_hits = False
    normalised = False

    def __init__(self, margin: float = 1.0) -> None:
        self.form = PairSum("relu", _check.number("margin", margin), paired=True, mean=True)

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B]."""
        return self.form.loss(target_score, scores, candidates)

    def __repr__(self) -> str:
        return f"HingeRanking(margin={self.form.margin})"
