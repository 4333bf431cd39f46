"""Tables that grow or shrink in place, with the state an optimiser keeps of them."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class KnowsRows(Protocol):
    """An optimiser that knows itself what it keeps of a row, and where a new one starts."""

    def resize_rows(self, parameter: nn.Parameter, old_rows: int) -> None:
        """Give the state of a parameter that had `old_rows` rows as many as it has now."""
        ...


def resize_rows(parameter: nn.Parameter, new_rows: Tensor, num_rows: int) -> None:
    """Give a parameter `num_rows` rows: the last ones go, or `new_rows` are added.

    The parameter stays the same object, so optimisers, tied modules and the user keep what they hold.
    """
    with torch.no_grad():
        parameter.data = torch.cat([parameter.data[:num_rows], new_rows.to(parameter)])
    parameter.grad = None


def resize_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, old_rows: int) -> None:
    """Give what the optimiser keeps of each row as many rows as the parameter now has.

    New ones start at 0, unless the optimiser knows better.
    """
    if isinstance(optimizer, KnowsRows):
        optimizer.resize_rows(parameter, old_rows)
        return
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == old_rows:
            fresh = value.new_zeros(max(0, len(parameter) - old_rows), *value.shape[1:])
            state[name] = torch.cat([value[: len(parameter)], fresh])
