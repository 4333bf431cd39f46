"""Optimisers in steps that a GPU replays: which can be recorded, and learning rates that a replay reads."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyclass.optim._rate import is_on_host
from manyclass.optim.adagrad import RowAdagrad
from manyclass.optim.adam import RowAdam
from manyclass.optim.chained import Chained
from manyclass.optim.sgd import RowSGD

_ROW_OPTIMISERS = (RowSGD, RowAdagrad, RowAdam)


def parts(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return optimisers with those that are chained one by one."""
    found: list[Optimizer] = []
    for optimizer in optimizers:
        found.extend(parts(optimizer.optimizers) if isinstance(optimizer, Chained) else [optimizer])
    return found


def refusal(optimizer: Optimizer) -> str | None:
    """Return the reason why the steps of an optimiser cannot be replayed; None if they can."""
    name = type(optimizer).__name__
    if isinstance(optimizer, RowSGD) and any(
        group["momentum"] or group["weight_decay"] for group in _groups(optimizer)
    ):
        return "RowSGD with momentum or weight decay keeps the history of its steps in Python"
    known = isinstance(optimizer, (*_ROW_OPTIMISERS, torch.optim.SGD))
    # torch's Adagrad counts steps in Python, but reads the count only for a decay of the learning rate.
    known = known or (isinstance(optimizer, torch.optim.Adagrad) and not any(g["lr_decay"] for g in _groups(optimizer)))
    if known or all("capturable" in group for group in _groups(optimizer)):
        return None
    return f"{name} has no option `capturable`, so it may keep numbers in Python"


def make_capturable(optimizer: Optimizer) -> None:
    """Let an optimiser of torch that can do so keep its numbers on the GPU of its parameters."""
    for group in _groups(optimizer):
        if group.get("capturable") is not False or not all(p.is_cuda for p in group["params"]):
            continue
        if isinstance(optimizer, _ROW_OPTIMISERS):
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(parameter.device, torch.float32)


class DeviceRates:
    """Learning rates in tensors on the device, which a recorded step reads in place of numbers.

    The groups of the optimisers keep their numbers, so that schedules and states are as they were.

    Args:
        optimizers: the optimisers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self._copied: dict[tuple[int, int], float] = {}

    def copy(self) -> None:
        """Copy the rates that have changed to the device."""
        for place, group in self._read_on_device():
            rate = float(group["lr"])
            if place not in self._tensors:
                first = group["params"][0]
                # Kernels of GPUs take numbers in float32, those of the CPU in float64.
                wide = first.dtype == torch.float64 or not first.is_cuda
                dtype = torch.float64 if wide else torch.float32
                self._tensors[place] = torch.tensor(rate, dtype=dtype, device=first.device)
            elif self._copied[place] != rate:
                self._tensors[place].fill_(rate)
            self._copied[place] = rate

    @contextlib.contextmanager
    def in_groups(self) -> Iterator[None]:
        """Put the tensors into the groups within the block."""
        swapped = [(group, group["lr"], self._tensors[place]) for place, group in self._read_on_device()]
        try:
            for group, _, tensor in swapped:
                group["lr"] = tensor
            yield
        finally:
            for group, rate, _ in swapped:
                group["lr"] = rate

    def baked(self) -> list[object]:
        """Return the options that a recorded step holds as constants."""
        found: list[object] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                left_out = ("params", "lr") if _reads_on_device(optimizer, group) else ("params",)
                found += [value for name, value in group.items() if name not in left_out]
        return found

    def _read_on_device(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if _reads_on_device(optimizer, group):
                    yield (i, j), group


def _reads_on_device(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return True if the learning rate of a group is a number that can be replaced by a tensor on the device."""
    rate = group["lr"]
    if not group["params"] or (isinstance(rate, Tensor) and not is_on_host(rate)):
        return False
    return isinstance(optimizer, _ROW_OPTIMISERS) or bool(group.get("capturable"))


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups
