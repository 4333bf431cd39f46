"""Checks on what users pass in: one place for their wording and for the flag that switches the costly ones.

Shapes, dtypes and devices are always checked. Checks that read values wait for a GPU, so by default they run on
the CPU only and never while a graph is compiled; `check_values` changes that.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_values: bool | None = None


class DivergedError(ValueError):
    """A loss that is not finite: nothing can be learnt from it, nor from those that would follow."""


def check_values(enabled: bool | None) -> None:
    """Say whether the values of arguments are checked: range of ids, NaN in losses.

    Args:
        enabled: True: on every device (a GPU is waited for); False: never; None: on the CPU only, the default.
    """
    global _values
    _values = enabled


def reads_values(tensor: Tensor) -> bool:
    """Whether the values of `tensor` may be looked at now."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" if _values is None else _values


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _where(position: tuple[int, ...]) -> str:
    if not position:
        return ""
    return f" at position {position[0] if len(position) == 1 else position}"


def at_first(values: Tensor, bad: Tensor) -> str:
    """'got V at position P' for the first place where `bad` holds."""
    position = _first(bad)
    return f"got {values[position].item()}{_where(position)}"


def tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a Tensor, got {type(value).__name__}")
    return value


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """An int in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"`{name}` must be {bounds}, got {value}")
    return value


def number(name: str, value: float, *, low: float = -math.inf, strict: bool = False) -> float:
    """A finite float, at least (or, if strict, above) `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    if not math.isfinite(value) or value < low or (strict and value == low):
        bound = "" if low == -math.inf else f" and {'above' if strict else 'at least'} {low:g}"
        raise ValueError(f"`{name}` must be finite{bound}, got {value}")
    return float(value)


def fraction(name: str, value: float) -> float:
    """A float in [0, 1)."""
    if not 0 <= number(name, value) < 1:
        raise ValueError(f"`{name}` must lie in [0, 1), got {value}")
    return float(value)


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def draws(k: object, rmse_log_z: float | None = None) -> None:
    """Raise unless k is None, an int above 0 or "auto", and `rmse_log_z` comes only with "auto"."""
    if isinstance(k, str):
        choice("k", k, ("auto",))
    elif k is not None:
        whole("k", k, 1)
    if rmse_log_z is not None:
        number("rmse_log_z", rmse_log_z, low=0, strict=True)
        if k != "auto":
            raise ValueError(f"`rmse_log_z` must come with `k` 'auto', got {rmse_log_z:g} with k = {k}")


def shape(name: str, value: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"`{name}` must have shape {list(expected)}, got {list(value.shape)}")


def device(name: str, value: Tensor, expected: torch.device) -> None:
    if value.device != expected:
        raise ValueError(f"`{name}` must be on {expected}, got {value.device}")


def extremes(value: Tensor) -> tuple[int, int]:
    """The least and the greatest of some integers; 0 of none."""
    if value.numel() == 0:
        return 0, 0
    least, most = value.aminmax()
    return int(least), int(most)


def ids(
    name: str, value: object, num_classes: int, *, pads: bool = False, ends: tuple[int, int] | None = None
) -> Tensor:
    """Class ids as int64, each in [0, num_classes); with `pads`, -1 as well. `ends`: their extremes, where known."""
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


def masses(name: str, value: object, num_classes: int | None = None) -> Tensor:
    """A vector of non-negative finite numbers, not all zero, as float64. For set-up: it reads values."""
    value = tensor(name, value)
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold numbers, got {value.dtype}")
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(f"`{name}` must be a vector with a number for each class, got shape {list(value.shape)}")
    if num_classes is not None and len(value) != num_classes:
        raise ValueError(f"`{name}` must have length {num_classes}, got {len(value)}")
    value = value.detach().to(torch.float64)
    # The extremes answer for all: NaN spreads into both, and no mask of C entries is made unless one is to be named.
    low, high = value.min(), value.max()
    if not (low >= 0 and torch.isfinite(high)):
        bad = ~(torch.isfinite(value) & (value >= 0))
        raise ValueError(f"`{name}` must be finite and not negative, {at_first(value, bad)}")
    if high == 0:
        raise ValueError(f"`{name}` must not all be 0, got {len(value)} zeros")
    return value


def finite_loss(loss: Tensor, **sources: Tensor | None) -> None:
    """Raise where the loss is NaN, and name the first source that holds a NaN."""
    if not reads_values(loss) or not (nan := loss.isnan()).any():
        return
    example = int(nan.nonzero()[0])
    for name, source in sources.items():
        if source is not None and (bad := source.isnan()).any():
            position = _where(_first(bad))
            raise DivergedError(f"The loss of example {example} is NaN: `{name}` must hold no NaN, got one{position}")
    raise DivergedError(f"The loss of example {example} is NaN, though no argument holds one: infinite scores?")


def place(name: str | torch.device) -> torch.device:
    """A device of this machine, one that can draw random numbers: "meta" is none.

    Raises:
        ValueError: torch does not know it, or does not find it here.
    """
    try:
        found = torch.empty(0, device=name).device
        torch.Generator(found)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`device` must be one that torch finds here, got {str(name)!r}: {reason}") from None
    return found
