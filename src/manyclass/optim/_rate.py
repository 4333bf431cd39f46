"""The learning rate: a number, or a tensor that a schedule fills in place and that no step waits for."""

from typing import Any

import torch
from torch import Tensor

from manyclass import _check


def check_rate(rate: object) -> None:
    """Check a learning rate.

    Raises:
        TypeError: it is neither a number nor a tensor of a floating-point dtype.
        ValueError: it is negative or not finite, or a tensor that does not have one element.
    """
    if not isinstance(rate, Tensor):
        _check.number("lr", rate, low=0)  # type: ignore[arg-type]
        return
    if not rate.is_floating_point():
        raise TypeError(f"`lr` must be a number or a floating-point tensor, got a tensor of {rate.dtype}")
    if rate.numel() != 1:
        raise ValueError(f"`lr` must have one element, got a tensor of shape {list(rate.shape)}")
    if _check.reads_values(rate):
        _check.number("lr", rate.item(), low=0)


def rate_of(group: dict[str, Any], parameter: Tensor) -> float | Tensor:
    """Return the learning rate of a group as a number or, on a GPU, as a tensor [] on the parameter's device.

    Raises:
        ValueError: it is on another device, and not on the CPU.
    """
    rate = group["lr"]
    if not isinstance(rate, Tensor) or is_on_host(rate):
        # A large int is a valid option, but torch takes only those of 64 bits.
        return float(rate)
    if rate.device != parameter.device:
        raise ValueError(f"`lr` must be on {parameter.device} or the CPU, got a tensor on {rate.device}")
    return rate.detach().reshape(())


def is_on_host(tensor: Tensor) -> bool:
    """Return True if a number can be read from a tensor without waiting for a GPU."""
    return tensor.device.type == "cpu"


def move_rate(group: dict[str, Any]) -> None:
    """Move the learning rate of a loaded group from another GPU to the device of its parameters."""
    rate = group["lr"]
    if isinstance(rate, Tensor) and not is_on_host(rate) and group["params"]:
        group["lr"] = rate.to(group["params"][0].device)


def subtract_(rows: Tensor, change: Tensor, rate: float | Tensor) -> Tensor:
    """Subtract η times a change from rows in place, and return them."""
    return rows.sub_(change * rate) if isinstance(rate, torch.Tensor) else rows.sub_(change, alpha=rate)
