"""Gradient clipping by norm, for dense and row-sparse gradients."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from manyclass import _check
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
    first, and stays so for the optimiser.

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
    elements = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            parameter.grad = coalesced_gradient(parameter)
            elements.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    # Empty gradients are left out: the maximum over no element is not defined.
    norm: Tensor = get_total_norm([part for part in elements if part.numel()], norm_type, error_if_nonfinite)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for part in elements:
        part.mul_(scale.to(part.device))
    return norm
