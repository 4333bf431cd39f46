"""Which rows of a parameter a gradient touches, each with the sum of what it holds for that row."""

import torch
from torch import Tensor

from manyclass.kernels import cpu
from manyclass.optim._rows import per_row, wide


def touched(parameter: Tensor) -> tuple[Tensor | None, Tensor]:
    """Ids [N] and gradient rows [N, ...] of a parameter; None for the ids: all rows, the gradient is dense.

    On the CPU ids are distinct. Elsewhere a repeated id may stay, and each of its places holds the sum over all of
    them: the number of distinct ids would have to be waited for. Rows computed from it come out the same at every
    place, so it does not matter which one is written last.
    """
    gradient = _checked(parameter)
    # Before the sum: that of many rows in half precision would lose most of them.
    gradient = gradient.to(wide(gradient.dtype))
    if not gradient.is_sparse:
        return None, gradient
    if _waits(gradient):
        ids, run, rows = _runs(gradient)
        return ids, rows[run]
    # Nothing is done again to what is coalesced already.
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


def scattered(parameter: Tensor, *state: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ids [1, N] and gradient rows [N, ...] as they came, repeats included, if a compiled kernel can take it from here.

    Args:
        parameter: with its gradient.
        state: the tables of the parameter's dtype that the kernel is to update beside it.
    """
    gradient = _checked(parameter)
    if not gradient.is_sparse or gradient.dtype != parameter.dtype:
        return None
    if not (cpu.is_available(parameter) and cpu.has_row_kernel(parameter, *state)):
        return None
    return gradient._indices().contiguous(), gradient._values().contiguous()


def summed(parameter: Tensor) -> Tensor:
    """The parameter's gradient, such that the values of a sparse one are its non-zero elements: no row comes twice.

    Where counting distinct rows would wait for the device, the sum of a repeated row is at the first of its places
    and the others hold zeros.
    """
    gradient = _checked(parameter)
    if not gradient.is_sparse:
        return gradient
    if not _waits(gradient):
        return gradient.coalesce()
    ids, run, rows = _runs(gradient)
    first = torch.ones_like(run, dtype=torch.bool)
    first[1:] = run[1:] != run[:-1]
    rows = torch.where(per_row(first, rows), rows[run], 0)
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, gradient.shape, check_invariants=False)


def _waits(gradient: Tensor) -> bool:
    """Whether to count the distinct rows of a sparse gradient is to wait for the device."""
    return not gradient.is_cpu and not gradient.is_coalesced()


def _runs(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [N] in ascending order, the run [N] of equal ids each belongs to, and the sums [N, ...] of the runs."""
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
