"""Batches on the device of a head."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.defaults import IGNORE_INDEX
from manyclass.training.ranks import ALONE, Ranks

_EXTRAS = ("weight", "include", "exclude", "log_z")


@dataclass(frozen=True)
class Batch:
    """A batch on the head's device.

    An iterable of batches yields `(inputs, target)` or `(inputs, target, extras)`, as tuples or lists; `extras` is a
    mapping with some of the head's arguments of the names below.

    Args:
        inputs: inputs of the encoder; without an encoder, the head's `hidden`.
        target: ids [...]; positions of -100 are ignored.
        weight: [...] or None: the weight of each example. It counts the same in every batch: the loss minimised is
            Σ w·loss divided by the number of targets, not by the sum of the weights in the batch.
        include: ids [..., I] or None. An evaluation, which scores all classes, needs none.
        exclude: ids [..., E] or None.
        log_z: [...] or None.
        examples: number of targets; on a GPU, to avoid a sync, ignored ones included.
    """

    inputs: Any
    target: Tensor
    weight: Tensor | None = None
    include: Tensor | None = None
    exclude: Tensor | None = None
    log_z: Tensor | None = None
    examples: int = 0

    @classmethod
    def of(cls, item: object, device: torch.device) -> "Batch":
        """Make a batch on the device from an item that an iterable yielded.

        Raises:
            TypeError: the item is neither a pair nor a pair with a mapping.
            ValueError: the mapping has a key that is not among the names above.
        """
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            got = f"{len(item)} parts" if isinstance(item, tuple | list) else type(item).__name__
            raise TypeError(f"`batches` must yield (inputs, target) or (inputs, target, extras), got {got}")
        inputs, target, extras = (*item, {})[:3]
        _check.tensor("target", target)
        if not isinstance(extras, Mapping):
            raise TypeError(f"`extras` must be a mapping, got {type(extras).__name__}")
        for name in extras:
            _check.choice("extras", name, _EXTRAS)
        examples = int((target != IGNORE_INDEX).sum()) if target.device.type == "cpu" else target.numel()
        given = {name: moved(extras.get(name), device) for name in _EXTRAS}
        return cls(moved(inputs, device), moved(target, device), **given, examples=examples)

    def extras(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the head that are given; a head need not accept the others."""
        given = {name: getattr(self, name) for name in _EXTRAS}
        return {name: value for name, value in given.items() if value is not None}

    def mean_weight(self, ranks: Ranks = ALONE) -> Tensor:
        """Return the mean weight of the targets not ignored of all processes, by which the mean loss was divided."""
        assert self.weight is not None
        present = self.target != IGNORE_INDEX
        weight, number = torch.where(present, self.weight, 0.0).sum(), present.sum()
        return ranks.summed(weight) / ranks.summed(number).clamp(min=1)


def device_of(head: nn.Module) -> torch.device:
    """Return the device of a head's tensors; the CPU if it has none."""
    found = next(itertools.chain(head.parameters(), head.buffers()), None)
    return torch.device("cpu") if found is None else found.device


def moved(value: Any, device: torch.device) -> Any:
    """Move tensors, also those in mappings, tuples and lists, to a device; other values are returned as they are.

    A mapping with a method `to`, such as a tokenizer's batch, moves itself; other mappings become dicts.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return value.to(device) if hasattr(value, "to") else {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
