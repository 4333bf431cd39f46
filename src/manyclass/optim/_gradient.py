"""Rows of a gradient, coalesced or raw."""

import torch
from torch import Tensor

from manyclass import _sparse_gradients
from manyclass.kernels import cpu
from manyclass.optim._rows import wide_dtype


def coalesced_rows(parameter: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return ids [N] and summed gradient rows [N, ...] of a parameter; the ids are None if the gradient is dense.

    On the CPU ids are distinct. On other devices an id may repeat, since counting the distinct ones would synchronise.
    Each of its places then holds the sum over all of them, so any of the equal rows computed from it may be written.
    """
    gradient = _checked(parameter)
    # The cast comes before the sum, which in half precision would lose most of many rows.
    gradient = gradient.to(wide_dtype(gradient.dtype))
    if not gradient.is_sparse:
        return None, gradient
    if gradient.is_coalesced() and gradient._nnz() == len(parameter):
        # Every row, in order: no row need be gathered.
        return None, gradient.values()
    if _sparse_gradients.would_synchronise(gradient):
        ids, run, rows = _sparse_gradients.runs(gradient)
        return ids, rows[run]
    # For a coalesced gradient this is a no-op.
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


def raw_rows(parameter: Tensor, *state: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return uncoalesced ids [1, N] and gradient rows [N, ...] if a kernel can update these tables, else None."""
    gradient = _checked(parameter)
    if not gradient.is_sparse or gradient.dtype != parameter.dtype:
        return None
    if not (cpu.is_available(parameter) and cpu.has_row_kernel(parameter, *state)):
        return None
    return gradient._indices().contiguous(), gradient._values().contiguous()


def coalesced_gradient(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient with the repeated rows of a sparse one summed, see `_sparse_gradients.summed`."""
    gradient = _checked(parameter)
    return _sparse_gradients.summed(gradient) if gradient.is_sparse else gradient


def _checked(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"`grad` must be dense or sparse COO, got {gradient.layout}")
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        raise ValueError(
            f"`grad` must be sparse in its rows alone (sparse_dim 1), got sparse_dim {gradient.sparse_dim()}"
        )
    return gradient
