"""Fallback of the closed form in torch's operators, for machines without compiled kernels."""

import math

import torch
from torch import Tensor

from manyclass.forms import LogSumExp
from manyclass.kernels.draw import GatheredDraw, PullBack


def log_sum_exp_(form: LogSumExp, scores: Tensor, draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Turn inner products [B, K] into ∂loss/∂s in place; return losses [B] and ∂loss/∂s(target) [B]."""
    target_score = (draw.hidden * draw.rows[: scores.shape[0]]).sum(1)
    log_kappa = draw.log_kappa.reshape(-1)
    offset = (log_kappa if form.kappa else torch.zeros_like(log_kappa)).to(scores.dtype)
    if draw.bias is not None:
        target_score += draw.bias.index_select(0, draw.target)
        offset = offset + draw.bias.index_select(0, draw.ids)
    scores += offset
    # Empty slots are filled, not added to: the score may be infinite.
    scores.index_fill_(1, log_kappa.isneginf().nonzero().squeeze(1), -math.inf)
    scores.index_put_(_hits(draw), scores.new_tensor(-math.inf))

    most = scores.amax(1)
    if form.target:
        most = torch.maximum(most, target_score)
    # An empty draw has no Z̃, and -inf minus -inf would be NaN.
    most = torch.where(most == -math.inf, 0.0, most)
    scores.sub_(most.unsqueeze(1)).exp_()
    z = scores.sum(1)
    target_u = (target_score - most).exp_() if form.target else torch.zeros_like(target_score)
    z += target_u
    empty = z == 0
    share = torch.where(empty, 0.0, 1 / z)
    scores.mul_(share.unsqueeze(1))
    return torch.where(empty, 0.0, most + z.log() - target_score), torch.where(empty, 0.0, target_u * share - 1)


def pull_back_(operands: PullBack) -> None:
    """Finish the gradients around the products of the backward pass; see `PullBack`."""
    hidden, grad = operands.hidden, operands.grad
    batch, target_grad = hidden.shape[0], operands.target_gradient * operands.grad
    if operands.grad_hidden is not None:
        operands.grad_hidden.mul_(grad.unsqueeze(1)).addcmul_(target_grad.unsqueeze(1), operands.rows[:batch])
    if operands.row_values is not None:
        torch.mul(hidden, grad.unsqueeze(1), out=operands.scaled_hidden)
        torch.mul(hidden, target_grad.unsqueeze(1), out=operands.row_values[:batch])
    if operands.bias_values is not None:
        operands.bias_values[:batch] = target_grad
        torch.mv(operands.score_gradient.T, grad, out=operands.bias_values[batch:])


def _hits(draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Return examples and slots [H] where the example excludes the slot's class, without B·K·E comparisons."""
    ascending, slot = draw.ids.sort()
    wanted = draw.excluded.reshape(-1)
    first = torch.searchsorted(ascending, wanted)
    number = torch.searchsorted(ascending, wanted, right=True) - first
    place = torch.repeat_interleave(number)
    # A class may fill several slots: `within` counts the hits of one excluded id.
    within = torch.arange(place.shape[0], device=place.device) - (number.cumsum(0) - number)[place]
    return place // max(draw.excluded.shape[1], 1), slot[first[place] + within]
