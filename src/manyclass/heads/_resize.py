"""Tables that grow or shrink in place, with the state an optimiser keeps of them."""

import torch
from torch import Tensor, nn


def resize_rows(parameter: nn.Parameter, new_rows: Tensor, num_rows: int) -> None:
    """Give a parameter `num_rows` rows: the last ones go, or `new_rows` are added.

    The parameter stays the same object, so optimisers, tied modules and the user keep what they hold.
    """
    with torch.no_grad():
        parameter.data = torch.cat([parameter.data[:num_rows], new_rows.to(parameter)])
    parameter.grad = None


def resize_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, old_rows: int) -> None:
    """Give what the optimiser keeps of each row as many rows as the parameter now has; new ones start at 0."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == old_rows:
            fresh = value.new_zeros(max(0, len(parameter) - old_rows), *value.shape[1:])
            state[name] = torch.cat([value[: len(parameter)], fresh])
