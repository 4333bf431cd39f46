"""Operands of the kernels: a draw with the tables that score it, and those of the closed form's two passes."""

from dataclasses import dataclass

from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.forms import DOT, Similarity


@dataclass(frozen=True)
class LinearDraw:
    """A draw with the tables that score it: s(c) = similarity(w_c, hidden) + b_c.

    Args:
        hidden: [B, D].
        weight, bias: the table [C, D], and [C] or None.
        target: int64 [B].
        candidates: classes to score.
        similarity: dot product, or cosine with its scale.
        sparse: whether the gradients of weight and bias are row-sparse.
        valid: bool [B], False for ignored examples, which a kernel may take into account; None: there are none.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    candidates: Candidates
    similarity: Similarity = DOT
    sparse: bool = False
    valid: Tensor | None = None


@dataclass(frozen=True)
class GatheredDraw:
    """One block of candidates that the batch shares, with its rows looked up: the operands of a forward kernel.

    All tensors are contiguous and on the CPU; hidden, rows and bias have one dtype.

    Args:
        hidden: [B, D].
        rows: [B + K, D], the rows of the targets and then those of the slots.
        bias: the table [C], or None.
        target, ids: int64 [B] and [K].
        log_kappa: float64 [1, K].
        excluded: int64 [B, E].
        num_classes: C.
    """

    hidden: Tensor
    rows: Tensor
    bias: Tensor | None
    target: Tensor
    ids: Tensor
    log_kappa: Tensor
    excluded: Tensor
    num_classes: int


@dataclass(frozen=True)
class PullBack:
    """Operands of the backward kernel, which finishes the gradients around the matrix products.

    Args:
        score_gradient, target_gradient: ∂loss/∂s of the slots [B, K] and of the targets [B].
        grad: gradient of the losses [B].
        hidden, rows: as in `GatheredDraw`.
        grad_hidden: [B, D]; in: score_gradient · rows of the slots, out: the gradient of hidden. None: not wanted.
        scaled_hidden: out [B, D], grad · hidden: the factor of the product that gives the slots' row gradients.
        row_values: out [B + K, D]; the kernel writes the first B, the targets' row gradients. None: not wanted.
        bias_values: out [B + K], the bias gradients of targets and slots. None: not wanted.
    """

    score_gradient: Tensor
    target_gradient: Tensor
    grad: Tensor
    hidden: Tensor
    rows: Tensor
    grad_hidden: Tensor | None
    scaled_hidden: Tensor | None
    row_values: Tensor | None
    bias_values: Tensor | None
