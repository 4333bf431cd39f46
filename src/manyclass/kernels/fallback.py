"""What lies between the products of `closed_form.py` in torch's operators, for machines without compiled kernels."""

import math

import torch
from torch import Tensor

from manyclass import native


def softmax_(scores: Tensor, draw: native.Draw, *, sums_target: bool, weighs: bool) -> tuple[Tensor, Tensor]:
    """As `native.softmax_`: inner products [B, K] become ∂loss/∂s in place; losses [B] and ∂loss/∂s(target) [B]."""
    own = (draw.hidden * draw.target_rows[: scores.shape[0]]).sum(1)
    log_kappa = draw.log_kappa.reshape(-1)
    offset = (log_kappa if weighs else torch.zeros_like(log_kappa)).to(scores.dtype)
    if draw.bias is not None:
        own += draw.bias.index_select(0, draw.target)
        offset = offset + draw.bias.index_select(0, draw.ids)
    scores += offset
    # Whatever their score, which may be infinite.
    scores.index_fill_(1, log_kappa.isneginf().nonzero().squeeze(1), -math.inf)
    scores.index_put_(_hits(draw), scores.new_tensor(-math.inf))

    most = scores.amax(1)
    if sums_target:
        most = torch.maximum(most, own)
    # An empty draw has no Z̃; less itself -inf would be NaN.
    most = torch.where(most == -math.inf, 0.0, most)
    scores.sub_(most.unsqueeze(1)).exp_()
    z = scores.sum(1)
    target_u = (own - most).exp_() if sums_target else torch.zeros_like(own)
    z += target_u
    empty = z == 0
    share = torch.where(empty, 0.0, 1 / z)
    scores.mul_(share.unsqueeze(1))
    return torch.where(empty, 0.0, most + z.log() - own), torch.where(empty, 0.0, target_u * share - 1)


def pull_back_(
    gradient: Tensor,
    target_gradient: Tensor,
    grad: Tensor,
    *,
    hidden: Tensor,
    target_rows: Tensor,
    grad_hidden: Tensor | None,
    weighed: Tensor | None,
    values: Tensor | None,
    bias_values: Tensor | None,
) -> None:
    """As `native.pull_back_`, in torch's operators."""
    batch, own = hidden.shape[0], target_gradient * grad
    if grad_hidden is not None:
        grad_hidden.mul_(grad.unsqueeze(1)).addcmul_(own.unsqueeze(1), target_rows[:batch])
    if values is not None and weighed is not None:
        torch.mul(hidden, grad.unsqueeze(1), out=weighed)
        torch.mul(hidden, own.unsqueeze(1), out=values[:batch])
    if bias_values is not None:
        bias_values[:batch] = own
        torch.mv(gradient.T, grad, out=bias_values[batch:])


def _hits(draw: native.Draw) -> tuple[Tensor, Tensor]:
    """Examples and slots [H] where the example excludes the slot's class: found by search, not by B·K comparisons."""
    ascending, slot = draw.ids.sort()
    wanted = draw.excluded.reshape(-1)
    first = torch.searchsorted(ascending, wanted)
    number = torch.searchsorted(ascending, wanted, right=True) - first
    place = torch.repeat_interleave(number)
    # How far into its own run of equal ids each hit is.
    within = torch.arange(place.shape[0]) - (number.cumsum(0) - number)[place]
    return place // max(draw.excluded.shape[1], 1), slot[first[place] + within]
