"""Operators that torch lacks for sparse gradients, so that the functions that expect dense ones work with them.

`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`, which Lightning and others call, need a norm and a clamp, and
`fully_shard` needs to put gradients together. An operator is registered only if torch has none for sparse tensors.
None of those for clipping waits for a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

BACKENDS = ("SparseCPU", "SparseCUDA")
_LIBRARIES = {name: Library(name, "IMPL") for name in ("aten", "fsdp")}


def _register(operator: str, function: Callable[..., Any]) -> None:
    library, name = operator.split("::")
    for backend in BACKENDS:
        # Asking for the kernels of an operator that is not defined yet is an error.
        known = bool(torch._C._dispatch_has_kernel(operator))
        if not (known and torch._C._dispatch_has_kernel_for_dispatch_key(operator, backend)):
            _LIBRARIES[library].impl(name, function, backend)


def would_synchronise(gradient: Tensor) -> bool:
    """Return True if coalescing would synchronise with the device."""
    return not gradient.is_cpu and not gradient.is_coalesced()


def runs(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted ids [N], the run of equal ids [N] that each belongs to, and the sums [N, ...] of the runs."""
    ids, order = gradient._indices()[0].sort()
    run = torch.zeros_like(ids)
    torch.cumsum(ids[1:] != ids[:-1], 0, out=run[1:])
    values = gradient._values()
    return ids, run, torch.zeros_like(values).index_add_(0, run, values[order])


def summed(gradient: Tensor) -> Tensor:
    """Return a sparse gradient with its repeated rows summed.

    If coalescing would synchronise, the first place of a repeated row holds the sum and the others hold zeros. Sums are
    rounded to the dtype of the gradient once: in half precision most of many rows would be lost.
    """
    if gradient.is_coalesced():
        return gradient
    dtype = gradient.dtype
    gradient = gradient.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    if gradient.sparse_dim() > 1 or not would_synchronise(gradient):
        return gradient.coalesce().to(dtype)
    ids, run, sums = runs(gradient)
    first = torch.ones_like(run, dtype=torch.bool)
    first[1:] = run[1:] != run[:-1]
    first = first.reshape(-1, *[1] * (sums.dim() - 1))
    rows = torch.where(first, sums[run], 0).to(dtype)
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows, gradient.shape, check_invariants=False)


def _norm(
    gradient: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm of all elements."""
    if ord <= 0 or dim is not None or keepdim:
        raise NotImplementedError(f"the norm of a sparse tensor is over all elements with ord above 0, got ord {ord}")
    values = summed(gradient)._values()
    # The maximum over no element is not defined.
    norm: Tensor = torch.linalg.vector_norm(values if values.numel() else values.new_zeros(1), ord, dtype=dtype)
    return norm


def _clamp_(gradient: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Clamp all elements in place; those that are not stored are 0 and stay so."""
    if (min is not None and min > 0) or (max is not None and max < 0):
        raise NotImplementedError(f"a sparse tensor is clamped to a range that holds 0, got min {min} and max {max}")
    if not gradient.is_coalesced():
        gradient.copy_(summed(gradient))
    gradient._values().clamp_(min, max)
    return gradient


def _clamp_min_(gradient: Tensor, min: float) -> Tensor:
    return _clamp_(gradient, min)


def _clamp_max_(gradient: Tensor, max: float) -> Tensor:
    return _clamp_(gradient, max=max)


def _chunk_cat(tensors: Sequence[Tensor], dim: int, num_chunks: int, *, out: Tensor) -> None:
    """Put gradients together for `fully_shard`, which divides them as dense tensors."""
    torch.ops.fsdp.chunk_cat([tensor.to_dense() for tensor in tensors], dim, num_chunks, out=out)


_register("aten::linalg_vector_norm", _norm)
_register("aten::clamp_", _clamp_)
_register("aten::clamp_min_", _clamp_min_)
_register("aten::clamp_max_", _clamp_max_)
_register("fsdp::chunk_cat", _chunk_cat)
