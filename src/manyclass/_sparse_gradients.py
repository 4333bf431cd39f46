"""Operators that torch lacks for sparse gradients, so that the functions that expect dense ones work with them.

`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`, which Lightning and others call, need a norm and a clamp, and
`fully_shard` needs to put gradients together. An operator is registered only if torch has none for sparse tensors.
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


def _summed(gradient: Tensor) -> Tensor:
    """Return the coalesced gradient, with sums in float32 at least: 16 bits would lose most of many rows."""
    wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
    return gradient.to(wide).coalesce()


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
    values = _summed(gradient).values()
    # The maximum over no element is not defined.
    norm: Tensor = torch.linalg.vector_norm(values if values.numel() else values.new_zeros(1), ord)
    return norm.to(gradient.dtype if dtype is None else dtype)


def _clamp_(gradient: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Clamp all elements in place; those that are not stored are 0 and stay so."""
    if (min is not None and min > 0) or (max is not None and max < 0):
        raise NotImplementedError(f"a sparse tensor is clamped to a range that holds 0, got min {min} and max {max}")
    if not gradient.is_coalesced():
        gradient.copy_(_summed(gradient))
    gradient.values().clamp_(min, max)
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
