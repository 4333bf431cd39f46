"""State of a module in plain attributes instead of buffers.

A buffer is cast by `.half()`, averaged by an EMA, broadcast by DistributedDataParallel, replaced by torch.func and
emptied by `to_empty`. Each of these would turn counts or weights into other numbers. So a module keeps them in plain
attributes, which follow it from device to device and are saved under the names of attributes. Whatever it derives from
them, such as a table that a kernel trusts, is not saved: when a state is loaded, it is built from checked values.

A module takes part by these assignments in its class body, and by the members of `PlainState`:

    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import isolated

MAX_STEPS = 1 << 53


class PlainState(Protocol):
    """The members that the functions below need."""

    saved: tuple[str, ...]
    """The names of the attributes to save, each a tensor whose shape does not depend on the progress of a training.

    Distributed checkpoints are read into the tensors of the present state.
    """

    @property
    def device(self) -> torch.device | None: ...

    def move(self, device: torch.device) -> None:
        """Move the attributes to a device."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved tensors, one for each name; raise ValueError, and change nothing, if they are invalid."""
        ...


def move_state(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Apply a conversion to parameters, buffers and children as nn.Module does, and its device to the plain state."""
    nn.Module._apply(self, fn, recurse)
    # The conversion may also change the dtype of floats, or return memory without values: only its device counts.
    device = fn(torch.empty(0, dtype=torch.int64, device=self.device or "cpu")).device
    # A tensor on the meta device has no values, and nothing could bring these back.
    if device != self.device and device.type != "meta":
        self.move(device)
    return self


def save_state(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Add the plain state to a state dict."""
    nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
    for name in self.saved:
        value = getattr(self, name)
        # Two samplers may share their counts, but files of tensors hold none that share memory.
        shared = any(value is other for other in destination.values())
        destination[prefix + name] = value.clone() if shared else value


def load_state(
    self: Any,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Restore the plain state from a state dict; an invalid one becomes one of torch's error messages."""
    found = {name: state_dict[prefix + name] for name in self.saved if prefix + name in state_dict}
    others = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in self.saved}
    nn.Module._load_from_state_dict(
        self, others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    )
    missing = [prefix + name for name in self.saved if name not in found]
    if missing:
        missing_keys.extend(missing if strict else ())
        return
    try:
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
                raise ValueError(f"`{name}` must be a dense tensor with values, got {_described(value)}")
        device = self.device or torch.device("cpu")
        with isolated():
            # A copy: the state dict may belong to another module, or be memory-mapped.
            self.restore({name: value.detach().to(device, copy=True) for name, value in found.items()})
    except (TypeError, ValueError) as error:
        error_msgs.append(f"While loading {prefix.rstrip('.') or type(self).__name__}: {error}")


def saved_vector(
    name: str, value: Tensor, dtype: torch.dtype, length: int | None = None, *, low: float | None = 0.0
) -> Tensor:
    """Return a loaded vector; raise ValueError if its dtype or length is another, or an entry is NaN or below `low`."""
    if value.dtype != dtype or value.dim() != 1 or length not in (None, len(value)):
        size = "N" if length is None else length
        raise ValueError(f"`{name}` must be {dtype} [{size}], got {_described(value)}")
    if low is not None and not bool((value >= low).all()):
        raise ValueError(f"`{name}` must not be below {low:g} or NaN, {_check.at_first(value, ~(value >= low))}")
    return value


def saved_ids(name: str, value: Tensor, num_classes: int, *, length: int | None = None) -> Tensor:
    """Return loaded ids; raise ValueError unless they are int64, ascending and distinct, inside [0, C)."""
    saved_vector(name, value, torch.int64, length)
    if len(value) and (int(value.max()) >= num_classes or not bool((value.diff() > 0).all())):
        raise ValueError(f"`{name}` must be distinct ids below {num_classes} in ascending order, got others")
    return value


def saved_progress(value: Tensor) -> tuple[int, bool]:
    """Return a loaded number of steps and staleness; raise ValueError unless they are one below 2⁵³ and a flag."""
    steps, stale = saved_vector("progress", value, torch.int64, 2).tolist()
    if steps >= MAX_STEPS:
        raise ValueError(f"`progress` must be a number of steps below 2⁵³, got {steps}")
    return steps, bool(stale)


def has_values(tensor: Tensor) -> bool:
    """Return False for a tensor on the meta device, and for one whose memory `fully_shard` has freed."""
    return not tensor.is_meta and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)


def index_dtype(num_classes: int) -> torch.dtype:
    """Return the smallest dtype that holds every id below `num_classes`."""
    return torch.int32 if num_classes < 2**31 else torch.int64


def saved_permutation(name: str, value: Tensor, num_classes: int) -> Tensor:
    """Return a loaded order of all classes; raise ValueError unless each is in it once."""
    saved_vector(name, value, index_dtype(num_classes), num_classes)
    if not torch.equal(value.sort().values, torch.arange(num_classes, dtype=value.dtype, device=value.device)):
        raise ValueError(f"`{name}` must hold each of {num_classes} classes once, got another order")
    return value


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
