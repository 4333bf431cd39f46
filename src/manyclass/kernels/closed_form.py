"""The loss of a draw that the whole batch shares, with its gradient in closed form.

In both forms of an objective the gradient with regard to the scores, -γ, is known as soon as the loss is: for a
log-sum-exp it is p̃, less 1 for the target. So a step is its three matrix products and one pass over the scores, where
autograd would keep and read them again several times. The eager reference is the objective itself, applied to the
scores of `kernels/eager.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyclass import native
from manyclass.candidates import Candidates
from manyclass.kernels import fallback

_DTYPES = (torch.float32, torch.float64)

# From inner products [B, K], which become ∂loss/∂s in place, to losses [B] and ∂loss/∂s(target) [B].
Form = Callable[[Tensor, native.Draw], tuple[Tensor, Tensor]]
Reference = Callable[[Tensor], Tensor]
Observe = Callable[[Tensor], None]


def log_sum_exp(*, target: bool, kappa: bool) -> Form:
    """-s(target) + log([target] exp s(target) + Σ_j [kappa: κ_j] exp s_j)."""
    kernel = native.softmax_ if native.runs_on() else fallback.softmax_
    return functools.partial(kernel, sums_target=target, weighs=kappa)


def pair_sum(*, activation: str, margin: float, paired: bool, positive: bool, mean: bool) -> Form | None:
    """[positive] softplus(-s(target)) + Σ_j φ(s_j - [paired] s(target) + margin), the sum divided by n if `mean`.

    None without compiled kernels: through torch's operators autograd is no slower.
    """
    if not native.runs_on():
        return None
    hinge = activation == "relu"
    return functools.partial(native.pair_sum_, margin=margin, paired=paired, positive=positive, mean=mean, hinge=hinge)


def has_closed_form(hidden: Tensor, weight: Tensor, bias: Tensor | None, candidates: Candidates) -> bool:
    """Whether `closed_form_loss` can serve: on the CPU, one block that the batch shares, one dtype."""
    tables = [weight] if bias is None else [weight, bias]
    return (
        len(candidates.blocks) == 1
        and candidates.blocks[0].ids.shape[0] == 1
        and hidden.dtype in _DTYPES
        and all(table.dtype == hidden.dtype and table.is_contiguous() for table in tables)
        and not torch.is_autocast_enabled("cpu")
        and native.is_plain(hidden, *tables)
    )


def closed_form_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    candidates: Candidates,
    *,
    form: Form,
    sparse: bool,
    reference: Reference,
    observe: Observe | None = None,
) -> Tensor:
    """Losses [B] of the form.

    Args:
        hidden: [B, D].
        weight, bias: the table [C, D], and [C] or None.
        target: int64 [B].
        candidates: one block that the whole batch shares.
        form: `log_sum_exp(…)` or `pair_sum(…)`.
        sparse: whether the gradients of weight and bias are row-sparse.
        reference: the same losses of hidden, eagerly, by autograd; for gradients of gradients.
        observe: is told of ∂loss/∂s [B, K], and must not keep it.
    """
    loss: Tensor = _Loss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, candidates, form, sparse, reference, observe
    )
    return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        candidates: Candidates,
        form: Form,
        sparse: bool,
        reference: Reference,
        observe: Observe | None,
    ) -> Tensor:
        block, batch = candidates.blocks[0], hidden.shape[0]
        ids = torch.cat([target, block.ids[0]])
        rows = weight.index_select(0, ids)
        gradient = hidden @ rows[batch:].T
        draw = native.Draw(
            hidden.contiguous(),
            rows,
            bias,
            ids[:batch],
            ids[batch:],
            block.log_kappa.contiguous(),
            candidates.excluded.contiguous(),
        )
        loss, target_gradient = form(gradient, draw)
        if observe is not None:
            observe(gradient)
        ctx.save_for_backward(hidden, weight, bias, ids, rows, gradient, target_gradient)
        ctx.sparse, ctx.reference = sparse, reference
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, rows, gradient, target_gradient = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *_differentiable(ctx.reference, grad, (hidden, weight, bias), wanted), *[None] * 6
        batch, grad, hidden = hidden.shape[0], grad.contiguous(), hidden.contiguous()
        grad_hidden = gradient @ rows[batch:] if wanted[0] else None
        values, weighed = (torch.empty_like(rows), torch.empty_like(hidden)) if wanted[1] else (None, None)
        bias_values = rows.new_empty(rows.shape[0]) if wanted[2] else None
        pull_back_ = native.pull_back_ if native.runs_on() else fallback.pull_back_
        pull_back_(
            gradient,
            target_gradient,
            grad,
            hidden=hidden,
            target_rows=rows,
            grad_hidden=grad_hidden,
            weighed=weighed,
            values=values,
            bias_values=bias_values,
        )
        if values is not None and weighed is not None:
            # The smaller factor is weighed, so that what was saved stays as it is for a second backward.
            torch.mm(gradient.T, weighed, out=values[batch:])
        grad_weight = None if values is None else _of_rows(ids, values, weight, ctx.sparse)
        grad_bias = None if bias_values is None else _of_rows(ids, bias_values, bias, ctx.sparse)
        return grad_hidden, grad_weight, grad_bias, *[None] * 6


def _of_rows(ids: Tensor, values: Tensor, table: Tensor, sparse: bool) -> Tensor:
    """The gradient of a table from those of its rows, which may repeat."""
    if sparse:
        return torch.sparse_coo_tensor(ids.unsqueeze(0), values, table.shape, check_invariants=False)
    return torch.zeros_like(table).index_add_(0, ids, values)


def _differentiable(
    reference: Reference, grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor | None], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients by autograd, which can be differentiated again."""
    needed = [x for x, want in zip(inputs, wanted, strict=True) if want and x is not None]
    found = iter(torch.autograd.grad(reference(inputs[0]), needed, grad, create_graph=True))
    return [next(found) if want else None for want in wanted]
