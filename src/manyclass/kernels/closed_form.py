"""Loss of a draw that the whole batch shares, with its gradient in closed form.

In both forms the gradient with regard to the scores, -γ, is known as soon as the loss is: for a log-sum-exp it is p̃,
less 1 for the target. So a step is its three matrix products and one pass over the scores; autograd would keep them
and read them again several times. The reference is `eager_loss`, which also computes the double backward pass.
"""

import math
from typing import Any

import torch
from torch import Tensor

from manyclass.forms import Form, LogSumExp
from manyclass.kernels import cpu, fallback
from manyclass.kernels.draw import GatheredDraw, LinearDraw, PullBack
from manyclass.kernels.eager import eager_loss
from manyclass.kernels.included import add_included_, pull_back_included_

_DTYPES = (torch.float32, torch.float64)


def has_closed_form(form: Form, draw: LinearDraw) -> bool:
    """Return True if `closed_form_loss` supports the draw: on the CPU, one block that the batch shares, one dtype.

    It supports dot products and untransformed target scores. A pair sum needs compiled kernels, since with torch's
    operators autograd is as fast, and no included classes, since it must count the slots of each example.
    """
    if draw.similarity.name != "dot" or form.target_transform is not None:
        return False
    blocks, dtype = draw.candidates.blocks, draw.hidden.dtype
    if not isinstance(form, LogSumExp) and (
        form.kappa or not form.needs_candidates or not cpu.is_available() or draw.candidates.included is not None
    ):
        return False
    tables = [draw.weight] if draw.bias is None else [draw.weight, draw.bias]
    return (
        len(blocks) == 1
        and blocks[0].ids.shape[0] == 1
        and dtype in _DTYPES
        and all(table.dtype == dtype and table.is_contiguous() for table in tables)
        and not torch.is_autocast_enabled("cpu")
        and cpu.is_plain(draw.hidden, *tables)
    )


def closed_form_loss(form: Form, draw: LinearDraw) -> tuple[Tensor, Tensor]:
    """Compute the losses of a form and their gradient with regard to the scores of the slots.

    Args:
        form: the loss.
        draw: the operands; `has_closed_form(form, draw)` must be True.

    Returns:
        The losses [B], and ∂loss/∂s [B, K], which is -γ. The latter is read again in the backward pass: it is not
        differentiable and must not be changed.
    """
    loss, score_gradient = _Loss.apply(draw.hidden, draw.weight, draw.bias, draw, form)  # type: ignore[no-untyped-call]
    return loss, score_gradient


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, draw: LinearDraw, form: Form
    ) -> tuple[Tensor, Tensor]:
        candidates, batch = draw.candidates, hidden.shape[0]
        block, *own = candidates.parts(empty=draw.target)
        ids = torch.cat([draw.target, block.ids[0], *(part.ids.reshape(-1) for part in own)])
        # The rows of targets and slots come first; those of the included classes follow.
        first = batch + block.ids.shape[1]
        rows = weight.index_select(0, ids)
        score_gradient = hidden @ rows[batch:first].T
        gathered = GatheredDraw(
            hidden.contiguous(),
            rows[:first],
            bias,
            ids[:batch],
            ids[batch:first],
            block.log_kappa.contiguous(),
            candidates.excluded.contiguous(),
            candidates.num_classes,
        )
        loss, target_gradient = _differentiate_(form, score_gradient, gathered)
        own_gradient = None
        if own:
            assert isinstance(form, LogSumExp)
            target_score = (hidden * rows[:batch]).sum(1)
            scores = (rows[first:].unflatten(0, own[0].ids.shape) @ hidden.unsqueeze(2)).squeeze(2)
            if bias is not None:
                target_score += bias.index_select(0, draw.target)
                scores += bias[own[0].ids]
            scores.masked_fill_(own[0].log_kappa.isneginf(), -math.inf)
            own_gradient = add_included_(
                form,
                target_score,
                scores,
                loss=loss,
                score_gradient=score_gradient,
                target_gradient=target_gradient,
            )
        ctx.mark_non_differentiable(score_gradient)
        # Otherwise autograd would allocate zeros [B, K] as the gradient of the second output.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, ids, rows, score_gradient, target_gradient, own_gradient)
        ctx.form, ctx.candidates, ctx.sparse = form, candidates, draw.sparse
        return loss, score_gradient

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, rows, score_gradient, target_gradient, own_gradient = ctx.saved_tensors
        wanted, batch = ctx.needs_input_grad[:3], hidden.shape[0]
        first = batch + score_gradient.shape[1]
        if torch.is_grad_enabled():
            draw = LinearDraw(hidden, weight, bias, ids[:batch], ctx.candidates, sparse=ctx.sparse)
            return *_differentiable(ctx.form, draw, grad, wanted), None, None
        hidden = hidden.contiguous()
        row_values = torch.empty_like(rows) if wanted[1] else None
        bias_values = rows.new_empty(rows.shape[0]) if wanted[2] else None
        pull_back = PullBack(
            score_gradient,
            target_gradient,
            grad.contiguous(),
            hidden,
            rows[:first],
            grad_hidden=score_gradient @ rows[batch:first] if wanted[0] else None,
            scaled_hidden=torch.empty_like(hidden) if wanted[1] else None,
            row_values=None if row_values is None else row_values[:first],
            bias_values=None if bias_values is None else bias_values[:first],
        )
        (cpu.pull_back_ if cpu.is_available() else fallback.pull_back_)(pull_back)
        if own_gradient is not None:
            pull_back_included_(
                own_gradient * grad.unsqueeze(1),
                hidden,
                rows[first:].unflatten(0, own_gradient.shape),
                grad_hidden=pull_back.grad_hidden,
                row_values=None if row_values is None else row_values[first:],
                bias_values=None if bias_values is None else bias_values[first:],
            )
        grad_weight = grad_bias = None
        if row_values is not None and pull_back.scaled_hidden is not None:
            # Scaling the smaller factor leaves the saved tensors unchanged, for a second backward pass.
            torch.mm(score_gradient.T, pull_back.scaled_hidden, out=row_values[batch:first])
            grad_weight = _table_gradient(ids, row_values, weight, ctx.sparse)
        if bias_values is not None:
            grad_bias = _table_gradient(ids, bias_values, bias, ctx.sparse)
        return pull_back.grad_hidden, grad_weight, grad_bias, None, None


def _differentiate_(form: Form, scores: Tensor, draw: GatheredDraw) -> tuple[Tensor, Tensor]:
    """Turn inner products [B, K] into ∂loss/∂s in place; return losses [B] and ∂loss/∂s(target) [B]."""
    if isinstance(form, LogSumExp):
        return (cpu.log_sum_exp_ if cpu.is_available() else fallback.log_sum_exp_)(form, scores, draw)
    return cpu.pair_sum_(form, scores, draw)


def _table_gradient(ids: Tensor, values: Tensor, table: Tensor, sparse: bool) -> Tensor:
    """Return the gradient of a table from those of its rows, which may repeat."""
    if sparse:
        return torch.sparse_coo_tensor(ids.unsqueeze(0), values, table.shape, check_invariants=False)
    return torch.zeros_like(table).index_add_(0, ids, values)


def _differentiable(form: Form, draw: LinearDraw, grad: Tensor, wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """Return the gradients of hidden, weight and bias by autograd, which can be differentiated again."""
    inputs = (draw.hidden, draw.weight, draw.bias)
    needed = [x for x, want in zip(inputs, wanted, strict=True) if want and x is not None]
    found = iter(torch.autograd.grad(eager_loss(form, draw), needed, grad, create_graph=True))
    return [next(found) if want else None for want in wanted]
