"""Which losses of a linear head have their gradient in closed form."""

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.heads._batch import Batch
from manyclass.heads._sampled import SampledHead, candidate_loss, observer
from manyclass.kernels import Form, closed_form_loss, has_closed_form, log_sum_exp, pair_sum
from manyclass.objectives import LogSumExp, Objective


class LinearHead(SampledHead, Protocol):
    """A head with a table of class vectors."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def similarity(self) -> str: ...

    @property
    def update(self) -> str: ...

    @property
    def sparse(self) -> bool: ...


def closed_form(head: LinearHead, batch: Batch, candidates: Candidates) -> Tensor | None:
    """Losses [B] over these candidates; None where only autograd can."""
    form = _form_of(head.objective, head.num_classes)
    plain = head.similarity == "dot" and head.update == "scored"
    if form is None or not plain or not has_closed_form(batch.hidden, head.weight, head.bias, candidates):
        return None
    return closed_form_loss(
        batch.hidden,
        head.weight,
        head.bias,
        batch.target,
        candidates,
        form=form,
        sparse=head.sparse,
        reference=lambda hidden: candidate_loss(head, replace(batch, hidden=hidden), candidates),
        observe=observer(head, candidates),
    )


def _form_of(objective: Objective, num_classes: int) -> Form | None:
    """How a kernel computes the objective; None where only autograd can."""
    form = objective.form
    # With a log z of its own, fixed or learned, an objective is more than its form.
    if form is None or objective.normalised:
        return None
    if isinstance(form, LogSumExp):
        return log_sum_exp(target=form.target, kappa=form.kappa)
    if form.kappa or not form.needs_candidates:
        return None
    return pair_sum(
        activation=form.activation,
        margin=form.margin_of(num_classes),
        paired=form.paired,
        positive=form.positive,
        mean=form.mean,
    )
