"""Steps and loading of state, the same for all row optimisers."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyclass.optim._rows import wide_dtype

Update = Callable[[Tensor, dict[str, Any]], None]


def update_all(optimizer: Optimizer, closure: Callable[[], float] | None, update: Update) -> float | None:
    """Call `update(parameter, group)` for every parameter that has a gradient, and return the closure's loss."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                update(parameter, group)
    return loss


def restore(optimizer: Optimizer, state_dict: dict[str, Any], exact: Collection[str] = ()) -> None:
    """Undo torch's cast of loaded state to the parameter's dtype: in bfloat16 counts would stop at 256.

    State named in `exact` keeps its dtype, other state takes the dtype of the arithmetic.
    """
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(saved, parameters, strict=True):
        if index in state_dict["state"]:
            _restore(optimizer.state[parameter], state_dict["state"][index], parameter, exact)


def _restore(loaded: dict[str, Any], saved: dict[str, Any], parameter: Tensor, exact: Collection[str]) -> None:
    for name, value in saved.items():
        if isinstance(value, dict):
            _restore(loaded[name], value, parameter, exact)
        elif isinstance(value, Tensor):
            dtype = value.dtype if name in exact else wide_dtype(parameter.dtype)
            loaded[name] = value.to(device=parameter.device, dtype=dtype)
