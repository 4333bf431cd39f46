"""Rows of a gradient, coalesced or raw."""

import torch
from torch import Tensor

from manyclass.kernels import cpu
from manyclass.optim._rows import per_row, wide_dtype


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
    if _would_synchronise(gradient):
        ids, run, rows = _runs(gradient)
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
    """Return the parameter's gradient with the repeated rows of a sparse one summed.

    If coalescing would synchronise, the first place of a repeated row holds the sum and the others hold zeros. Sums are
    rounded to the dtype of the gradient once.
    """
    gradient = _checked(parameter)
    if not gradient.is_sparse or gradient.is_coalesced():
        return gradient
    dtype = gradient.dtype
    # The cast comes before the sum, which in half precision would lose most of many rows.
    gradient = gradient.to(wide_dtype(dtype))
    if not _would_synchronise(gradient):
        return gradient.coalesce().to(dtype)
    ids, run, rows = _runs(gradient)
    first = torch.ones_like(run, dtype=torch.bool)
    first[1:] = run[1:] != run[:-1]
    rows = torch.where(per_row(first, rows), rows[run], 0).to(dtype)
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, gradient.shape, check_invariants=False)


def _would_synchronise(gradient: Tensor) -> bool:
    """Return True if coalescing would synchronise with the device."""
    return not gradient.is_cpu and not gradient.is_coalesced()


def _runs(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted ids [N], the run of equal ids [N] that each belongs to, and the sums [N, ...] of the runs."""
    ids, order = gradient._indices()[0].sort()
    run = torch.zeros_like(ids)
    torch.cumsum(ids[1:] != ids[:-1], 0, out=run[1:])
    values = gradient._values()
    return ids, run, torch.zeros_like(values).index_add_(0, run, values[order])


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
