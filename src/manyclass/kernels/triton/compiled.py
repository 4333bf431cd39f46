"""The loss of a draw as an operator of graphs that torch.compile makes, with the kernels of eager code.

A graph cannot hold a draw: the operator takes its tensors, and the sizes and options that describe them. Around it the
compiler sees the lookup of the rows and whatever computes the hidden vectors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import Form, LogSumExp, PairSum, target_log_kappa
from manyclass.kernels.all_classes import product_dtype
from manyclass.kernels.triton.closed_form import DrawOperands, backward_pass, forward_pass, gradient_scale
from manyclass.kernels.triton.slots import Layout, Part

Tables = tuple[Tensor, Tensor, Tensor | None]


def compiled_loss(
    form: Form,
    hidden: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    layout: Layout,
    draw: Candidates,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return losses [B] and ∂loss/∂s [B, ΣK + I] in a graph that is being compiled, as `closed_form_loss` does.

    Args:
        form: the form of the objective, without a transform of the target's score.
        hidden: [B, D].
        rows, bias: of the targets and then of all slots of the layout, [N, D] and [N] or None.
        layout: the slots.
        draw: knows how often a target is drawn.
        valid: bool [B], False for ignored examples; None: there are none.
    """
    dtype = product_dtype(hidden)
    log_kappa = target_log_kappa(draw, torch.float64) if not isinstance(form, LogSumExp) and form.kappa else None
    activation, flags, margin = _words(form, layout.num_classes)
    shapes = [n for part in layout.parts for n in (*part.ids.shape, part.size, int(part.drawn))]
    scale = gradient_scale(form, dtype)
    ids = torch.cat([part.ids.reshape(-1) for part in layout.parts])
    loss, scores, _ = draw_loss(
        hidden.to(dtype),
        rows.to(dtype),
        bias,
        ids,
        torch.cat([part.log_kappa.reshape(-1) for part in layout.parts]),
        log_kappa,
        valid,
        layout.order,
        layout.excluded,
        layout.mask,
        shapes,
        layout.rows,
        layout.num_classes,
        activation,
        flags,
        margin,
        scale,
    )
    plain = layout.order is None and layout.rows == layout.batch and scale == 1
    return loss, scores.detach() if plain else None


@torch.library.custom_op("manyclass::draw_loss", mutates_args=())
def draw_loss(
    hidden: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    log_kappa: Tensor,
    target_kappa: Tensor | None,
    valid: Tensor | None,
    order: Tensor | None,
    excluded: Tensor,
    mask: Tensor | None,
    shapes: Sequence[int],
    height: int,
    num_classes: int,
    activation: str,
    flags: Sequence[bool],
    margin: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `forward_pass` does, for slots given as flat tensors and the shapes of their parts."""
    layout = _layout(ids, log_kappa, order, excluded, mask, shapes, len(hidden), height, num_classes)
    # The targets' classes are not read.
    all_ids = torch.cat([ids[:1].expand(len(hidden)), ids])
    operands = DrawOperands(hidden, rows, bias, all_ids, valid)
    return forward_pass(_form(activation, flags, margin), layout, operands, target_kappa, scale)


@draw_loss.register_fake
def _(hidden: Tensor, rows: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    shapes, height = given[8], given[9]
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    loss = hidden.new_empty(len(hidden), dtype=wide)
    return loss, hidden.new_empty(height, sum(shapes[1::4])), torch.empty_like(loss)


@torch.library.custom_op("manyclass::draw_loss_backward", mutates_args=())
def draw_loss_backward(
    grad: Tensor,
    hidden: Tensor,
    rows: Tensor,
    scores: Tensor,
    target_gradient: Tensor,
    ids: Tensor,
    valid: Tensor | None,
    order: Tensor | None,
    excluded: Tensor,
    shapes: Sequence[int],
    num_classes: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, rows and biases."""
    # Of the log κ only the shape matters here.
    layout = _layout(ids, ids, order, excluded, None, shapes, len(hidden), len(scores), num_classes)
    operands = DrawOperands(hidden, rows, None, None, valid)
    found = backward_pass(layout, operands, scores, target_gradient, grad, (True, True, True), scale)
    assert found[0] is not None
    assert found[1] is not None
    assert found[2] is not None
    return found[0], found[1], found[2]


@draw_loss_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, rows: Tensor, scores: Tensor, target_gradient: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(rows), target_gradient.new_empty(len(rows))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, rows, bias, ids, _, _, valid, order, excluded, _, shapes, _, num_classes, _, _, _, scale = inputs
    _, scores, target_gradient = output
    ctx.save_for_backward(hidden, rows, scores, target_gradient, ids, valid, order, excluded)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.numbers = shapes, num_classes, scale


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_rows, grad_bias = draw_loss_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return grad_hidden, grad_rows, None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype), *[None] * 14


draw_loss.register_autograd(_backward, setup_context=_save)


def _words(form: Form, num_classes: int) -> tuple[str, list[bool], float]:
    """Return a form as values that an operator takes."""
    if isinstance(form, LogSumExp):
        return "", [form.target, form.kappa], 0.0
    flags = [form.paired, form.kappa, form.positive, form.mean, form.needs_candidates]
    return form.activation, flags, form.margin_of(num_classes)


def _form(activation: str, flags: Sequence[bool], margin: float) -> Form:
    """Return the form of such values."""
    if not activation:
        target, kappa = flags
        return LogSumExp(target, kappa)
    paired, kappa, positive, mean, needs_candidates = flags
    return PairSum(
        "relu" if activation == "relu" else "softplus",
        margin,
        paired=paired,
        kappa=kappa,
        positive=positive,
        mean=mean,
        needs_candidates=needs_candidates,
    )


def _layout(
    ids: Tensor,
    log_kappa: Tensor,
    order: Tensor | None,
    excluded: Tensor,
    mask: Tensor | None,
    shapes: Sequence[int],
    batch: int,
    height: int,
    num_classes: int,
) -> Layout:
    parts: list[Part] = []
    first = place = 0
    for i in range(0, len(shapes), 4):
        groups, k, size, drawn = shapes[i : i + 4]
        here = slice(place, place + groups * k)
        parts.append(Part(ids[here].view(groups, k), log_kappa[here].view(groups, k), size, first, place, bool(drawn)))
        first, place = first + k, place + groups * k
    return Layout(tuple(parts), order, batch, height, first, excluded, mask, num_classes)
