"""The protocol of objectives."""

from typing import Protocol

from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import Form


class Objective(Protocol):
    """Function from scores and κ to one loss per example; its gradient with regard to the scores is -γ.

    Attributes:
        form: the form of the loss, or None: the objective is then computed by autograd alone.
        keeps_hits: whether a drawn class that is the target stays a candidate.
        normalised: whether the scores are taken as log-probabilities up to a known log z, so that
            `head(..., log_z=…)` has a meaning.
    """

    @property
    def form(self) -> Form | None: ...

    @property
    def keeps_hits(self) -> bool: ...

    @property
    def normalised(self) -> bool: ...

    def __call__(self, target_score: Tensor, scores: Tensor, candidates: Candidates) -> Tensor:
        """Return losses [B] from target scores [B] and scores [B, ΣK] that are -inf where a class is excluded."""
        ...
