"""Resizing of tables in place, together with their optimiser state."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class RowOptimizer(Protocol):
    """An optimiser that can resize its per-row state."""

    def resize_rows(self, parameter: nn.Parameter, old_rows: int) -> None:
        """Resize the state of a parameter that had `old_rows` rows to its present number of rows."""
        ...


def resize_rows(parameter: nn.Parameter, new_rows: Tensor, num_rows: int) -> None:
    """Resize a parameter to `num_rows` rows: remove the last ones, or append `new_rows`.

    The parameter stays the same object, so the references of optimisers and tied modules stay valid.
    """
    with torch.no_grad():
        parameter.data = torch.cat([parameter.data[:num_rows], new_rows.to(parameter)])
    parameter.grad = None


def resize_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, old_rows: int) -> None:
    """Resize the optimiser's per-row state to the present number of rows of the parameter.

    The state of new rows is 0, unless the optimiser initialises it differently. Of `Chained`, one of its optimisers has
    the parameter.
    """
    for part in getattr(optimizer, "optimizers", ()):
        resize_state(part, parameter, old_rows)
    if isinstance(optimizer, RowOptimizer):
        optimizer.resize_rows(parameter, old_rows)
        return
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == old_rows:
            fresh = value.new_zeros(max(0, len(parameter) - old_rows), *value.shape[1:])
            state[name] = torch.cat([value[: len(parameter)], fresh])
