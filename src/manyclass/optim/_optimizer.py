"""Steps and loading of state, the same for all row optimisers."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyclass import _check
from manyclass.optim._kernels import OPTIONS
from manyclass.optim._rate import move_rate
from manyclass.optim._rows import wide_dtype

Update = Callable[[Tensor, dict[str, Any]], None]
CheckOptions = Callable[[dict[str, Any]], None]
CheckState = Callable[[dict[str, Any], Tensor], None]


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


MAX_OPTION = 1e30  # of a loaded state; float32 must hold it and its products


def check_loaded(
    optimizer: Optimizer, state_dict: dict[str, Any], check_options: CheckOptions, check_state: CheckState
) -> None:
    """Check a state dict before it is loaded: kernels trust sizes and dtypes of the state.

    Args:
        optimizer: the optimiser that loads it.
        state_dict: the state dict; any object.
        check_options: called with the options of each group, raises if one is missing or out of range.
        check_state: called with the state of each parameter that has any, and the parameter; raises if it is not one.

    Raises:
        TypeError, ValueError: the state dict is not that of such an optimiser of such parameters.
    """
    groups, state = (
        state_dict.get(name) if isinstance(state_dict, dict) else None for name in ("param_groups", "state")
    )
    if not isinstance(state, dict) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise ValueError("`state_dict` must have `state` and `param_groups`, got an object without them")
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    ids = [group.get("params") for group in groups]
    if not all(isinstance(part, list) for part in ids) or [len(part) for part in ids] != wanted:
        raise ValueError(f"`state_dict` must have groups of {wanted} parameters, got others")
    flat = [i for part in ids for i in part]
    if not all(type(i) is int for i in flat) or len(set(flat)) < len(flat) or not set(state) <= set(flat):
        raise ValueError("`state_dict` must number each parameter once, and hold state of these alone, got others")
    for group in groups:
        for name in optimizer.defaults:
            # A first load has added "differentiable" to the defaults, but to no group.
            if name not in group and name not in OPTIONS and name != "differentiable":
                raise ValueError(f"`state_dict` must have the option {name!r} in each group, got one without it")
        check_options(group)
        for name, value in group.items():
            number = value.item() if isinstance(value, Tensor) and _check.reads_values(value) else value
            if isinstance(number, int | float) and not abs(number) <= MAX_OPTION:
                raise ValueError(f"`{name}` must lie within ±{MAX_OPTION:g}, got {number}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for i, parameter in zip(flat, parameters, strict=True):
        if i in state:
            if not isinstance(state[i], dict):
                raise TypeError(f"`state_dict` must hold a dict for each parameter, got {type(state[i]).__name__}")
            if state[i]:
                check_state(state[i], parameter)


def check_names(state: dict[str, Any], names: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise unless the state of a parameter has these entries and, besides, at most the optional ones."""
    if not set(names) <= set(state) <= {*names, *optional}:
        wanted, got = (", ".join(map(repr, x)) or "nothing" for x in (names, state))
        raise ValueError(f"the state of a parameter must have {wanted}, got {got[:200]}")


def check_table(state: dict[str, Any], name: str, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Check that an entry is a dense tensor of one of these shapes and of this dtype; None: of any real one."""
    table = _check.tensor(name, state[name])
    good = table.is_floating_point() if dtype is None else table.dtype == dtype
    if tuple(table.shape) not in shapes or not good or table.layout != torch.strided:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        kind = "floating point" if dtype is None else dtype
        raise ValueError(
            f"`{name}` must have shape {wanted} and dtype {kind}, got {list(table.shape)} of {table.dtype}"
        )
    return table


def restore(optimizer: Optimizer, state_dict: dict[str, Any], exact: Collection[str] = ()) -> None:
    """Undo torch's cast of loaded state to the parameter's dtype: in bfloat16 counts would stop at 256.

    State named in `exact` keeps its dtype, other state takes the dtype of the arithmetic.
    """
    for group in optimizer.param_groups:
        move_rate(group)
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
