"""The choice of the implementation of a row update, and the operands of Triton's."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyclass import _check
from manyclass.kernels import IMPLS, runs_triton

# Options of every row optimiser; states that were saved before these existed lack them.
OPTIONS: dict[str, Any] = {"impl": "auto", "stochastic_rounding": False}


def check_options(options: dict[str, Any]) -> None:
    """Check the options that all row optimisers have.

    Raises:
        TypeError: `stochastic_rounding` is not a bool.
        ValueError: `impl` does not exist.
    """
    _check.choice("impl", options.get("impl", "auto"), IMPLS)
    rounding = options.get("stochastic_rounding", False)
    if not isinstance(rounding, bool):
        raise TypeError(f"`stochastic_rounding` must be True or False, got {rounding!r}")


def add_missing_options(optimizer: Optimizer) -> None:
    """Give groups of a loaded state the options that it lacks."""
    for options in (optimizer.defaults, *optimizer.param_groups):
        for name, value in OPTIONS.items():
            options.setdefault(name, value)


def triton_rows(parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return ids [N], gradient rows [N, ...] and the seed of random rounding for Triton's kernels; None: not for them.

    Dense gradients, and those that hold every row in order, need no sort: torch's operators are as fast.

    Raises:
        ValueError: `impl` is "triton", and its kernels cannot run on the parameter's device.
    """
    if not runs_triton(parameter, impl=group["impl"]):
        return None
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1 or gradient._nnz() == 0:
        return None
    from manyclass.kernels.triton.rows import can_update

    if not can_update(parameter) or (gradient.is_coalesced() and gradient._nnz() == len(parameter)):
        return None
    seed = None
    if group["stochastic_rounding"] and parameter.dtype == torch.bfloat16:
        seed = torch.randint(1 << 62, (1,), device=parameter.device)
    return gradient._indices()[0].contiguous(), gradient._values().contiguous(), seed
