"""Checks of user input: one place for the wording of errors and for the flag that controls expensive checks.

Shapes, dtypes and devices are always checked. Checks of values synchronise with a GPU, so by default they run on the
CPU only, and never while a graph is compiled or a step is recorded; `check_values` changes that.
"""

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from manyclass._recording import is_recorded

_values_checked: bool | None = None


class DivergedError(ValueError):
    """The loss is not finite, so training cannot continue."""


def check_values(enabled: bool | None) -> None:
    """Choose whether the values of arguments are checked: range of ids, NaN in losses.

    Args:
        enabled: True: on every device, which synchronises with a GPU; False: never; None, the default: on the CPU only.
    """
    global _values_checked
    _values_checked = enabled


def reads_values(tensor: Tensor) -> bool:
    """Return True if the values of `tensor` may be checked now."""
    if torch.compiler.is_compiling() or is_recorded():
        return False
    return tensor.device.type == "cpu" if _values_checked is None else _values_checked


def _first_position(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _position_text(position: tuple[int, ...]) -> str:
    if not position:
        return ""
    return f" at position {position[0] if len(position) == 1 else position}"


def values(name: str, value: Tensor) -> Tensor:
    """Return a tensor that has values; raise ValueError for one on the meta device."""
    if value.is_meta:
        raise ValueError(f"`{name}` must have values, got a tensor on the meta device: make it with device='cpu'")
    return value


def at_first(values: Tensor, bad: Tensor) -> str:
    """Return 'got V at position P' for the first True in `bad`."""
    position = _first_position(bad)
    return f"got {values[position].item()}{_position_text(position)}"


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a Tensor, got {type(value).__name__}")
    return value


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Check that the value is an int in [low, high], and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"`{name}` must be {bounds}, got {value}")
    return value


def number(name: str, value: float, *, low: float = -math.inf, strict: bool = False) -> float:
    """Check that the value is finite and at least (or, if strict, above) `low`, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    # A float cannot hold every int.
    finite = -sys.float_info.max <= value <= sys.float_info.max
    if not finite or value < low or (strict and value == low):
        bound = "" if low == -math.inf else f" and {'above' if strict else 'at least'} {low:g}"
        raise ValueError(f"`{name}` must be finite{bound}, got {value}")
    return float(value)


def fraction(name: str, value: float) -> float:
    """Check that the value lies in [0, 1), and return it as a float."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"`{name}` must lie in [0, 1), got {value}")
    return float(value)


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def draws(k: object, rmse_log_z: float | None = None) -> None:
    """Raise unless k is None, an int above 0 or "auto", and `rmse_log_z` comes without an int."""
    if isinstance(k, str):
        choice("k", k, ("auto",))
    elif k is not None:
        integer("k", k, 1)
    if rmse_log_z is not None:
        number("rmse_log_z", rmse_log_z, low=0, strict=True)
        if isinstance(k, int):
            raise ValueError(f"`rmse_log_z` must come without `k`, or with `k` 'auto', got {rmse_log_z:g} with k = {k}")


def shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"`{name}` must have shape {list(expected)}, got {list(value.shape)}")


def device(name: str, value: Tensor, expected: torch.device) -> None:
    if value.device != expected:
        raise ValueError(f"`{name}` must be on {expected}, got {value.device}")


def extremes(value: Tensor) -> tuple[int, int]:
    """Return the minimum and maximum of an integer tensor, or 0 and 0 if it is empty."""
    if value.numel() == 0:
        return 0, 0
    least, most = value.aminmax()
    return int(least), int(most)


def ids(
    name: str, value: object, num_classes: int, *, pads: bool = False, ends: tuple[int, int] | None = None
) -> Tensor:
    """Check that class ids lie in [0, num_classes), or are -1 with `pads`; return int64. `ends`: extremes, if known."""
    value = tensor(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integers, got {value.dtype}")
    value = value.long()
    low = -1 if pads else 0
    if ends is not None or reads_values(value):
        least, most = extremes(value) if ends is None else ends
        if least < low or most >= num_classes:
            bad = (value < low) | (value >= num_classes)
            or_pad = " (or be -1, a pad)" if pads else ""
            raise ValueError(f"`{name}` must lie in [0, {num_classes}){or_pad}, {at_first(value, bad)}")
    return value


def ids_by_example(name: str, value: object, num_classes: int, target: Tensor) -> Tensor:
    """Check class ids [*target.shape, N], padded with -1, on the device of `target`; return int64."""
    found = ids(name, value, num_classes, pads=True)
    if found.dim() != target.dim() + 1 or found.shape[:-1] != target.shape:
        expected = ", ".join(map(str, (*target.shape, "N")))
        raise ValueError(f"`{name}` must have shape [{expected}], got {list(found.shape)}")
    device(name, found, target.device)
    return found


def nonnegative_vector(name: str, value: object, num_classes: int | None = None) -> Tensor:
    """Check a vector of finite non-negative numbers, not all zero; return float64. It synchronises with a GPU.

    A tensor on the meta device has no values: ones on the CPU stand for it until a state dict is loaded.
    """
    value = tensor(name, value)
    if value.is_meta:
        value = torch.ones(value.shape, device="cpu")
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold numbers, got {value.dtype}")
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(f"`{name}` must be a vector with a number for each class, got shape {list(value.shape)}")
    if num_classes is not None and len(value) != num_classes:
        raise ValueError(f"`{name}` must have length {num_classes}, got {len(value)}")
    value = value.detach().to(torch.float64)
    # Checking the extremes suffices, since NaN propagates to both, and avoids a mask of C entries in the normal case.
    low, high = value.min(), value.max()
    if not (low >= 0 and torch.isfinite(high)):
        bad = ~(torch.isfinite(value) & (value >= 0))
        raise ValueError(f"`{name}` must be finite and not negative, {at_first(value, bad)}")
    if high == 0:
        raise ValueError(f"`{name}` must not all be 0, got {len(value)} zeros")
    return value


def finite_loss(loss: Tensor, **sources: Tensor | None) -> None:
    """Raise if the loss is NaN, and name the first source that holds a NaN."""
    if not reads_values(loss) or not (nan := loss.isnan()).any():
        return
    example = int(nan.nonzero()[0])
    for name, source in sources.items():
        if source is not None and (bad := source.isnan()).any():
            position = _position_text(_first_position(bad))
            raise DivergedError(f"The loss of example {example} is NaN: `{name}` must hold no NaN, got one{position}")
    raise DivergedError(f"The loss of example {example} is NaN, though no argument holds one: infinite scores?")


def available_device(name: str | torch.device) -> torch.device:
    """Return a device that exists on this machine and can draw random numbers, which "meta" cannot.

    Raises:
        ValueError: the device is unknown to torch, not on this machine, or cannot draw random numbers.
    """
    try:
        found = torch.empty(0, device=name).device
        torch.Generator(found)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`device` must be one that torch finds here, got {str(name)!r}: {reason}") from None
    return found
