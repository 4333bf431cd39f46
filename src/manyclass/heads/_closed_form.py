"""Losses of a linear head whose gradient has a closed form."""

from typing import Protocol

from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import Similarity
from manyclass.heads._batch import Batch
from manyclass.heads._sampled import SampledHead
from manyclass.kernels import LinearDraw, closed_form_loss, has_closed_form


class LinearHead(SampledHead, Protocol):
    """A head with a table of class vectors."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def similarity(self) -> str: ...

    @property
    def scale(self) -> float: ...

    @property
    def update(self) -> str: ...

    @property
    def sparse(self) -> bool: ...


def closed_form(head: LinearHead, batch: Batch, candidates: Candidates) -> tuple[Tensor, Tensor] | None:
    """Return losses [B] and ∂loss/∂s [B, K] over these candidates; None if only autograd can compute them."""
    form = head.objective.form
    # The log z of a normalised objective, fixed or learned, is not in its form.
    if form is None or head.objective.normalised or head.update != "scored":
        return None
    similarity = Similarity(head.similarity, head.scale)
    draw = LinearDraw(batch.hidden, head.weight, head.bias, batch.target, candidates, similarity, head.sparse)
    return closed_form_loss(form, draw) if has_closed_form(form, draw) else None
