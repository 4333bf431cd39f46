"""The part of the closed form that belongs to included classes, of which each example has its own."""

import math

import torch
from torch import Tensor

from manyclass.forms import LogSumExp


def add_included_(
    form: LogSumExp,
    target_score: Tensor,
    scores: Tensor,
    *,
    loss: Tensor,
    score_gradient: Tensor,
    target_gradient: Tensor,
) -> Tensor:
    """Add included classes to the Z̃ of a shared draw.

    Args:
        form: the loss.
        target_score: [B].
        scores: [B, I], -inf for an empty slot.
        loss: in and out [B]; this and what follows is changed from the shared draw's to that of both.
        score_gradient: in and out [B, K], ∂loss/∂s of the shared slots.
        target_gradient: in and out [B], ∂loss/∂s of the targets.

    Returns:
        ∂loss/∂s of the included classes [B, I].
    """
    # exp(loss) is Z̃/u(target), to which an included class adds u/u(target).
    relative = scores - target_score.unsqueeze(1)
    # Unless the target is summed, a shared draw may be empty: its loss is 0 then, but its Z̃ too.
    shared = loss if form.target else torch.where(target_gradient == 0, -math.inf, loss)
    total = torch.cat([shared.unsqueeze(1), relative], 1).logsumexp(1)
    empty = total == -math.inf
    total = total.masked_fill_(empty, 0.0)
    share = (shared - total).exp_()
    loss.copy_(total)
    score_gradient.mul_(share.unsqueeze(1))
    target_gradient.add_(1).mul_(share).sub_(1).masked_fill_(empty, 0.0)
    return relative.sub_(total.unsqueeze(1)).exp_()


def pull_back_included_(
    gradient: Tensor,
    hidden: Tensor,
    rows: Tensor,
    *,
    grad_hidden: Tensor | None,
    row_values: Tensor | None,
    bias_values: Tensor | None,
) -> None:
    """Add the gradient of included classes to that of hidden, and write those of their rows and biases.

    Args:
        gradient: [B, I], the gradient of their scores.
        hidden: [B, D].
        rows: [B, I, D].
        grad_hidden: in and out [B, D]; None: not wanted.
        row_values: out [B · I, D]; None: not wanted.
        bias_values: out [B · I]; None: not wanted.
    """
    if grad_hidden is not None:
        grad_hidden += (gradient.unsqueeze(1) @ rows).squeeze(1)
    if row_values is not None:
        torch.mul(gradient.unsqueeze(2), hidden.unsqueeze(1), out=row_values.view_as(rows))
    if bias_values is not None:
        bias_values.copy_(gradient.reshape(-1))
