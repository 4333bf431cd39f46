"""The examples of a head's loss: flattened, masked, weighted and reduced."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyclass import _check
from manyclass.defaults import IGNORE_INDEX
from manyclass.kernels import runs_triton

REDUCTIONS = ("mean", "sum", "none")
MAX_TARGETS = 1 << 16  # that one program of a kernel reads; more take torch's operators, which share the work


@dataclass(frozen=True)
class Examples:
    """A batch of B examples, flattened from any shape.

    Args:
        hidden: [B, ...].
        target: int64 [B]; an ignored example has the target of another one, so that it scores no further row.
        valid: bool [B], False for ignored examples; None if values were checked and all examples count.
        weight: [B] or None.
        exclude: int64 [B, E] or None, without the target of the example.
        log_z: [B] or None.
        shape: the shape of the targets before.
        include: int64 [B, I] or None; its values may be the target, repeated or excluded.
        share: [B], the share of each example in a mean without weights, 0 for ignored ones; None: not known.
    """

    hidden: Tensor
    target: Tensor
    valid: Tensor | None
    weight: Tensor | None
    exclude: Tensor | None
    log_z: Tensor | None
    shape: torch.Size
    include: Tensor | None = None
    share: Tensor | None = None

    def present(self) -> "Examples":
        """Return the examples that are not ignored. Synchronises with the device; the shape depends on the data.

        Raises:
            ValueError: all examples are ignored.
        """
        if self.valid is None:
            return self
        if not self.valid.any():
            raise ValueError(f"`target` must hold a class that is not ignored, got {len(self.target)} ignored ones")
        return replace(self.at(self.valid), valid=None)

    def first(self, number: int) -> "Examples":
        """Return the first examples, or all if there are fewer."""
        return self.at(slice(number))

    def at(self, rows: Tensor | slice) -> "Examples":
        """Return some of the examples."""
        valid, weight, include, exclude, log_z = (
            None if x is None else x[rows] for x in (self.valid, self.weight, self.include, self.exclude, self.log_z)
        )
        hidden, target = self.hidden[rows], self.target[rows]
        return Examples(hidden, target, valid, weight, exclude, log_z, target.shape, include)

    def without_ignored(self, loss: Tensor) -> Tensor:
        """Return losses [B] with 0 for ignored examples, whose losses may be infinite."""
        return loss if self.valid is None else torch.where(self.valid, loss, 0.0)

    def reduce(self, loss: Tensor, reduction: str) -> Tensor:
        """Reduce losses [B], 0 for ignored examples, to a weighted mean, a sum, or losses of the shape of the targets.

        The mean is 0 if all examples are ignored or have weight 0.
        """
        if reduction == "mean" and self.weight is None:
            if self.valid is None:
                return loss.mean()
            if self.share is not None:
                return loss.dot(self.share.to(loss.dtype))
        if self.weight is not None:
            loss = loss * self.weight
        if reduction == "none":
            return loss.reshape(self.shape)
        if reduction == "sum":
            return loss.sum()
        share = torch.ones_like(loss) if self.weight is None else self.weight
        if self.valid is not None:
            share = torch.where(self.valid, share, 0.0)
        return loss.sum() / share.sum().clamp(min=torch.finfo(loss.dtype).tiny)


def flatten_examples(
    hidden: Tensor,
    target: Tensor,
    num_classes: int,
    *,
    weight: Tensor | None = None,
    include: Tensor | None = None,
    exclude: Tensor | None = None,
    log_z: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    may_be_empty: bool = False,
) -> Examples:
    """Check a head's arguments against each other and flatten the examples.

    There may be no example if `may_be_empty` is true.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype, device or value.
    """
    _check.choice("reduction", reduction, REDUCTIONS)
    _check.tensor("hidden", hidden)
    _check.tensor("target", target)
    if target.numel() == 0 and not may_be_empty:
        raise ValueError(f"`target` must hold at least one class, got shape {list(target.shape)}")
    if hidden.shape[: target.dim()] != target.shape:
        raise ValueError(
            f"`target` must have the leading shape of `hidden`, {list(hidden.shape[:-1])}, got {list(target.shape)}"
        )
    _check.device("target", target, hidden.device)
    given, shape = target, target.shape
    valid = share = ends = None
    if _check.reads_values(target) and not target.is_floating_point():
        ends = _check.extremes(target)
    # If values may be read and no target is ignored, everything below is much shorter.
    if ends is None or ends[0] <= ignore_index <= ends[1]:
        ends = None
        if 0 < target.numel() <= MAX_TARGETS and target.dtype == torch.int64 and runs_triton(target):
            from manyclass.kernels.triton.targets import present_targets

            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            target, valid, share = present_targets(target.reshape(-1).contiguous(), ignore_index, dtype=wide)
        else:
            valid = (target != ignore_index).reshape(-1)
            if not target.is_floating_point() and target.numel():
                flat = target.reshape(-1)
                target = torch.where(valid, flat, flat.masked_fill(~valid, 0).amax())
    target = _check.ids("target", target, num_classes, ends=ends).reshape(-1)
    if len(shape) != 1:
        hidden = hidden.reshape(target.shape[0], *hidden.shape[len(shape) :])
    if weight is not None:
        _check_floats(weight, "weight", shape, hidden.device)
        weight = weight.reshape(-1)
        if _check.reads_values(weight) and (bad := ~((weight >= 0) & (weight < math.inf))).any():
            raise ValueError(f"`weight` must be finite and not negative, {_check.at_first(weight, bad)}")
    if include is not None:
        include = _check.ids_by_example("include", include, num_classes, given)
        include = include.reshape(len(target), include.shape[-1])
    if exclude is not None:
        exclude = _check.ids_by_example("exclude", exclude, num_classes, given)
        exclude = exclude.reshape(len(target), exclude.shape[-1])
        # The exclusions may be all labels of an example, its target among them.
        exclude = exclude.masked_fill(exclude == target.unsqueeze(1), -1)
    if log_z is not None:
        _check_floats(log_z, "log_z", shape, hidden.device)
        log_z = log_z.reshape(-1)
    return Examples(hidden, target, valid, weight, exclude, log_z, shape, include, share)


def _check_floats(value: Tensor, name: str, shape: torch.Size, device: torch.device) -> None:
    _check.tensor(name, value)
    if not value.is_floating_point():
        raise TypeError(f"`{name}` must hold floating-point numbers, got {value.dtype}")
    _check.shape(name, value, tuple(shape))
    _check.device(name, value, device)
