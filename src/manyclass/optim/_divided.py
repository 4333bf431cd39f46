"""State of row optimisers over tables whose rows are divided among processes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from manyclass._shard import Shard


def wrapped(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which state with a row for each class is a DTensor of all classes."""
    return _mapped(optimizer, state_dict, lambda shard, value: shard.wrapped(value))


def unwrapped(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the rows of this process, of one that `wrapped` returned or of an undivided table."""
    return _mapped(optimizer, state_dict, lambda shard, value: shard.unwrapped(value))


def _mapped(
    optimizer: Optimizer, state_dict: dict[str, Any], change: "Callable[[Shard, Tensor], Tensor]"
) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards: dict[int, Shard] = {i: p.shard for i, p in enumerate(parameters) if hasattr(p, "shard")}
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    if not shards or not isinstance(state, dict):
        return state_dict
    # Numbered in the order of the groups; all tensors of a row optimiser but those of a history have a row for each.
    changed = {
        i: {
            name: change(shards[i], value) if i in shards and isinstance(value, Tensor) else value
            for name, value in of_parameter.items()
        }
        for i, of_parameter in state.items()
    }
    return {**state_dict, "state": changed}
