"""Loss of a draw on a GPU, with its gradient in closed form.

The rows of targets and slots are looked up by autograd, which also turns vectors into directions and gives the tables
their gradients. Between the batched products, one kernel turns scores into losses and their gradient, in place, and one
finishes the gradients of the backward pass. Scores are stored once, in the dtype of the products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import Form, LogSumExp, target_log_kappa
from manyclass.kernels.all_classes import product_dtype
from manyclass.kernels.draw import LinearDraw
from manyclass.kernels.eager import at_least_float32, directions
from manyclass.kernels.triton.log_sum_exp import log_sum_exp_
from manyclass.kernels.triton.pair_sum import pair_sum_
from manyclass.kernels.triton.pull_back import pull_back
from manyclass.kernels.triton.slots import Layout, Operands, Part

MIN_SCORES_OF_SHORT_IDS = 1 << 24  # from which reading ids of 32 bits saves more than the copy takes
HALF_SCALE = 256.0  # of ∂loss/∂s in float16, whose smallest number is 6e-8


def closed_form_loss(form: Form, draw: LinearDraw) -> tuple[Tensor, Tensor | None] | None:
    """Return losses [B] and ∂loss/∂s [B, ΣK + I], which is -γ; None if kernels do not support the form or the draw.

    The second is None if the batch was sorted into groups, or if it is scaled. It is read again in the backward pass:
    it is not differentiable and must not be changed.
    """
    layout = Layout.of(draw.candidates, draw.target)
    if layout is None or form.target_transform is not None:
        return None
    ids = torch.cat([draw.target, *(part.ids.reshape(-1) for part in layout.parts)])
    rows = directions(F.embedding(ids, draw.weight, sparse=draw.sparse), draw.similarity, scaled=False)
    bias = None if draw.bias is None else torch.gather(draw.bias, 0, ids, sparse_grad=draw.sparse)
    hidden = directions(draw.hidden, draw.similarity)
    loss, gradient = _Loss.apply(hidden, rows, bias, ids, form, layout, draw)  # type: ignore[no-untyped-call]
    plain = layout.order is None and layout.rows == layout.batch and gradient_scale(form, product_dtype(hidden)) == 1
    return loss, gradient if plain else None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        given_hidden: Tensor,
        given_rows: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        form: Form,
        layout: Layout,
        draw: LinearDraw,
    ) -> tuple[Tensor, Tensor]:
        dtype = product_dtype(given_hidden)
        scale = gradient_scale(form, dtype)
        operands = DrawOperands(given_hidden.to(dtype), given_rows.to(dtype), bias, ids, draw.valid)
        kappa = None
        if not isinstance(form, LogSumExp) and form.kappa:
            kappa = target_log_kappa(draw.candidates, torch.float64)
        loss, scores, target_gradient = forward_pass(form, layout, operands, kappa, scale)
        ctx.mark_non_differentiable(scores)
        # Otherwise autograd would allocate zeros [B, K] as the gradient of the second output.
        ctx.set_materialize_grads(False)
        # Copies in another dtype or order are made again rather than kept.
        ctx.save_for_backward(given_hidden, given_rows, bias, scores, target_gradient)
        ctx.form, ctx.layout, ctx.candidates, ctx.scale = form, layout, draw.candidates, scale
        ctx.dtype, ctx.valid = dtype, draw.valid
        return loss, scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        *inputs, scores, target_gradient = ctx.saved_tensors
        layout, wanted = ctx.layout, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            loss = _differentiable_loss(ctx.form, inputs, layout, ctx.candidates, ctx.dtype)
            loss = loss if ctx.valid is None else torch.where(ctx.valid, loss, 0.0)
            needed = [x for x, want in zip(inputs, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(loss, needed, grad, create_graph=True))
            return *(next(found) if want else None for want in wanted), *[None] * 4
        operands = DrawOperands(inputs[0].to(ctx.dtype), inputs[1].to(ctx.dtype), inputs[2], None, ctx.valid)
        gradients = backward_pass(layout, operands, scores, target_gradient, grad, wanted, ctx.scale)
        pairs = zip(gradients, inputs, strict=True)
        return *(x if x is None else x.to(y.dtype) for x, y in pairs), *[None] * 4


@dataclass(frozen=True)
class DrawOperands:
    """The operands of the two passes; hidden and rows have the dtype of the products.

    Args:
        hidden: [B, D].
        rows: [B + Σ G·K, D], the rows of the targets and then those of the slots.
        bias: their biases, or None.
        ids: int64, their classes, which only the forward pass reads.
        valid: bool [B], False for ignored examples; None: there are none.
    """

    hidden: Tensor
    rows: Tensor
    bias: Tensor | None
    ids: Tensor | None
    valid: Tensor | None


def forward_pass(
    form: Form, layout: Layout, operands: DrawOperands, log_kappa: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [B], ∂loss/∂s [rows, columns] times `scale`, and ∂loss/∂s(target) [B].

    Args:
        form: the form of the objective.
        layout: the slots.
        operands: vectors and classes.
        log_kappa: float64 [B], log κ of the targets, if the form adds it.
        scale: see `gradient_scale`.
    """
    batch, rows, bias, ids = layout.batch, operands.rows, operands.bias, operands.ids
    assert ids is not None
    with torch.autocast(rows.device.type, enabled=False):
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        offset, target_offset = _offset(form, layout, wide), None
        if bias is not None:
            target_offset, offset = bias[:batch], offset + bias[batch:]
        if log_kappa is not None:
            log_kappa = log_kappa.to(offset.dtype)
            target_offset = log_kappa if target_offset is None else target_offset + log_kappa
        hidden = _by_group(operands.hidden, layout)
        scores = hidden.new_empty(layout.rows, layout.columns)
        for part, part_rows in zip(layout.parts, _by_part(rows, layout), strict=True):
            torch.bmm(_grouped(hidden, part), part_rows.transpose(1, 2), out=_columns(scores, part))
        slot_ids = ids[batch:]
        if scores.numel() >= MIN_SCORES_OF_SHORT_IDS and layout.num_classes <= 1 << 31:
            slot_ids = slot_ids.to(torch.int32)
        given = Operands(hidden, rows, offset, slot_ids, target_offset, operands.valid)
        if isinstance(form, LogSumExp):
            loss, target_gradient = log_sum_exp_(form, scores, given, layout, scale)
        else:
            loss, target_gradient = pair_sum_(form, scores, given, layout, scale)
    return loss, scores, target_gradient


def backward_pass(
    layout: Layout,
    operands: DrawOperands,
    scores: Tensor,
    target_gradient: Tensor,
    grad: Tensor,
    wanted: Sequence[bool],
    scale: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, rows and bias that are wanted.

    Args:
        layout: the slots.
        operands: vectors, as in the forward pass.
        scores, target_gradient: what the forward pass returned.
        grad: the gradient of the losses [B].
        wanted: whether each of the three gradients is.
        scale: the factor of `scores`.
    """
    hidden, rows = _by_group(operands.hidden, layout), operands.rows
    batch, grad = layout.batch, grad.contiguous()
    product = torch.empty_like(hidden) if wanted[0] else None
    grad_rows, scaled_hidden = (torch.empty_like(rows), torch.empty_like(hidden)) if wanted[1] else (None, None)
    grad_hidden = hidden.new_empty(batch, hidden.shape[1]) if wanted[0] else None
    parts = list(zip(layout.parts, _by_part(rows, layout), strict=True))
    if product is not None:
        for i, (part, part_rows) in enumerate(parts):
            out = _grouped(product, part)
            if i == 0:
                torch.bmm(_columns(scores, part), part_rows, out=out)
            else:
                out.baddbmm_(_columns(scores, part), part_rows)
    pull_back(
        hidden,
        rows[:batch],
        grad,
        target_gradient,
        operands.valid,
        layout,
        product=product,
        grad_hidden=grad_hidden,
        scaled_hidden=scaled_hidden,
        grad_targets=None if grad_rows is None else grad_rows[:batch],
        scale=scale,
    )
    if grad_rows is not None and scaled_hidden is not None:
        for (part, _rows), out in zip(parts, _by_part(grad_rows, layout), strict=True):
            torch.bmm(_columns(scores, part).transpose(1, 2), _grouped(scaled_hidden, part), out=out)
    grad_bias = _bias_gradient(scores, grad, target_gradient, layout, scale) if wanted[2] else None
    return grad_hidden, grad_rows, grad_bias


def _differentiable_loss(
    form: Form, inputs: list[Any], layout: Layout, candidates: Candidates, dtype: torch.dtype
) -> Tensor:
    """Return the losses [B] of hidden, rows and bias by torch's operators, differentiable any number of times."""
    hidden, rows, bias = inputs[0].to(dtype), inputs[1].to(dtype), inputs[2]
    batch, grouped = layout.batch, _by_group(hidden, layout)
    target_score = (at_least_float32(hidden) * at_least_float32(rows[:batch])).sum(1)
    if bias is not None:
        target_score = target_score + bias[:batch]
    found = []
    for part, part_rows in zip(layout.parts, _by_part(rows, layout), strict=True):
        scores = torch.bmm(_grouped(grouped, part), part_rows.transpose(1, 2))
        if bias is not None:
            first = batch + part.place
            scores = scores + bias[first : first + part.ids.numel()].reshape(part.ids.shape).unsqueeze(1)
        scores = at_least_float32(scores.flatten(0, 1)[:batch])
        scores = scores if layout.order is None else scores.index_select(0, layout.order.argsort())
        found.append(scores)
    hits = torch.cat([candidates.block_hits(block) for block in candidates.blocks], 1)
    scores = torch.cat(found, 1)
    hits = F.pad(hits, (0, scores.shape[1] - hits.shape[1]))
    return form.loss(target_score, scores.masked_fill(hits, -math.inf), candidates)


def gradient_scale(form: Form, dtype: torch.dtype) -> float:
    """Return the factor that ∂loss/∂s is stored with."""
    # A sum that is no mean may be large already.
    bounded = isinstance(form, LogSumExp) or form.mean
    return HALF_SCALE if bounded and dtype == torch.float16 else 1.0


def _offset(form: Form, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of all slots [Σ G·K] beside their biases: log κ, a margin; -inf: empty."""
    log_kappa = layout.log_kappa
    offset = log_kappa if form.kappa else torch.zeros_like(log_kappa).masked_fill_(log_kappa.isneginf(), -math.inf)
    # Not in the kernel, where a number would be rounded to float32.
    return (offset if isinstance(form, LogSumExp) else offset + form.margin_of(layout.num_classes)).to(dtype)


def _by_group(hidden: Tensor, layout: Layout) -> Tensor:
    """Return hidden [rows, D] in the order of the groups, padded with 0."""
    if layout.order is not None:
        hidden = hidden.index_select(0, layout.order)
    return F.pad(hidden, (0, 0, 0, layout.rows - layout.batch)) if layout.rows > layout.batch else hidden.contiguous()


def _by_part(rows: Tensor, layout: Layout) -> list[Tensor]:
    """Return views [G, K, D] of the rows of each part."""
    found = []
    for part in layout.parts:
        first = layout.batch + part.place
        found.append(rows[first : first + part.ids.numel()].view(*part.ids.shape, -1))
    return found


def _grouped(hidden: Tensor, part: Part) -> Tensor:
    """Return a view [G, size, D] of rows [rows, D]."""
    groups = part.ids.shape[0]
    return hidden[: groups * part.size].view(groups, part.size, -1)


def _columns(scores: Tensor, part: Part) -> Tensor:
    """Return a view [G, size, K] of the scores of a part."""
    groups, k = part.ids.shape
    columns = scores[: groups * part.size, part.first : part.first + k]
    return columns.view(groups, part.size, k)


def _bias_gradient(scores: Tensor, grad: Tensor, target_gradient: Tensor, layout: Layout, scale: float) -> Tensor:
    """Return the gradients of the biases of targets and slots [N]."""
    grouped = _by_group(grad.unsqueeze(1), layout)
    factor = (grouped / scale).to(scores.dtype)
    found = [grad * target_gradient]
    for part in layout.parts:
        sums = _columns(scores, part).transpose(1, 2) @ _grouped(factor, part)
        found.append(sums.reshape(-1).to(grad.dtype))
    return torch.cat(found)
