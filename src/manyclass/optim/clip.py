"""Gradient clipping by norm, for dense and row-sparse gradients."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from manyclass import _check
from manyclass._shard import Shard
from manyclass.optim._gradient import coalesced_gradient


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the norm of all gradients together at `max_norm`, in place.

        g ← g · min(1, max_norm / (‖g‖ + 10⁻⁶))

    It is torch.nn.utils.clip_grad_norm_ for dense and row-sparse gradients alike. A sparse gradient is coalesced
    first, and stays so for the optimiser. Rows that are divided among processes count on all of them; each process
    must then call it with the same parameters.

    Args:
        parameters: the parameters; those without a gradient are skipped.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm, above 0; may be infinity.
        error_if_nonfinite: whether an infinite or NaN norm raises an error, which synchronises with the device.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: an option is outside its range.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is True.

    Example:
        >>> table = torch.nn.Embedding(1000, 4, sparse=True)
        >>> table(torch.tensor([3, 3])).sum().backward()
        >>> clip_grad_norm_(table.parameters(), 1.0)
        tensor(4.)
    """
    _check.number("max_norm", max_norm, low=0)
    if norm_type != math.inf:
        _check.number("norm_type", norm_type, low=0, strict=True)
    elements: list[Tensor] = []
    by_shard: dict[Shard | None, list[Tensor]] = {None: []}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        # Also without a gradient on this process: others may have one.
        own = by_shard.setdefault(getattr(parameter, "shard", None), [])
        if parameter.grad is not None:
            parameter.grad = coalesced_gradient(parameter)
            own.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
            elements.append(own[-1])
    norms = [_norm(parts, norm_type, shard) for shard, parts in by_shard.items() if parts or shard is not None]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"gradients with a non-finite norm cannot be clipped, got {norm} of order {norm_type:g}")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for part in elements:
        # `fully_shard` leaves DTensors, which do not multiply with a plain tensor.
        local = part.to_local() if hasattr(part, "to_local") else part
        local.mul_(scale.to(part.device))
    return norm


def _norm(parts: list[Tensor], norm_type: float, shard: Shard | None) -> Tensor:
    """Return the norm of gradients together, with those of all processes among which the rows are divided."""
    # Empty gradients are left out: the maximum over no element is not defined.
    own: Tensor = get_total_norm([part for part in parts if part.numel()], norm_type)
    own = own.full_tensor() if hasattr(own, "full_tensor") else own
    if shard is None or shard.ranks == 1:
        return own
    # In one dtype: a process without a gradient knows that of no other.
    everyone = shard.gathered(own.to(shard.device, torch.float64).reshape(1), [1] * shard.ranks)
    norm: Tensor = torch.linalg.vector_norm(everyone, norm_type)
    return norm
