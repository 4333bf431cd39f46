"""The source of a sampler's weights, from which its table is rebuilt when they change."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._shard import Shard
from manyclass.counts import ClassCounts


class WeightSource(nn.Module):
    """Weights of C classes: a tensor or ClassCounts, to a power, without the classes that are summed elsewhere.

    A class of weight 0 would never be drawn, and Z̃ would be biased. In a tensor it gets the smallest positive weight;
    ClassCounts are smoothed by their own rule.

    Args:
        weights: C numbers or ClassCounts.
        power: exponent of the weights.
        left_out: ids of classes that are summed elsewhere and must not be drawn; their weights may be 0.
        name: the argument of the sampler that holds the weights, for errors.
        smooth: whether a weight of 0 in a tensor becomes the smallest positive one.
    """

    def __init__(
        self,
        weights: Tensor | ClassCounts,
        *,
        power: float = 1.0,
        left_out: Tensor | None = None,
        name: str = "weights",
        smooth: bool = True,
    ) -> None:
        super().__init__()
        self.power = _check.number("power", power)
        self.left_out = left_out
        self.name = name
        self._resizable = isinstance(weights, ClassCounts)
        if isinstance(weights, ClassCounts):
            self.weights = weights
        else:
            self.weights = ClassCounts(_check.nonnegative_vector(name, weights), smoothing=None if smooth else 0.0)
        self._undrawable: int | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WeightSource":
        # A tensor of weights is read for rebuilds alone, so it takes no memory of a GPU that the sampler moves to.
        return super()._apply(fn, recurse) if self._resizable else self  # type: ignore[no-untyped-call]

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        return self.weights.num_classes

    def read(self, power: float | None = None) -> Tensor:
        """Return the weights, float64 [C], 0 for the classes that must not be drawn; a copy that may be written to.

        Args:
            power: exponent of the weights; None: that of the source.
        """
        mass = self.weights.weights(self.power if power is None else power)
        never = mass == 0 if len(mass) and mass.min() == 0 else None
        if self.left_out is not None:
            left_out = self.left_out.to(mass.device)
            if self.shard is not None:
                left_out = left_out[self.shard.holds(left_out)] - self.shard.first
            mass[left_out] = 0
            if never is not None:
                never[left_out] = False
        found = int(never.nonzero()[0]) if never is not None and never.any() else None
        if self.shard is not None:
            # All processes refuse a draw together.
            first = float(self.shard.numbers(math.inf if found is None else found + self.shard.first).min())
            found = None if first == math.inf else int(first)
        self._undrawable = found
        return mass

    @property
    def shard(self) -> Shard | None:
        """The classes of this process, if they are divided."""
        return self.weights.shard

    def divide(self, shard: Shard) -> None:
        """Keep the classes of this process alone."""
        self.weights.divide(shard)

    def check_every_class_drawn(self) -> None:
        """Raise ValueError if a class has weight 0 and is not summed explicitly; `read` has searched for one."""
        if self._undrawable is not None:
            raise ValueError(
                f"`{self.name}` must be above 0 for every class that is not explicit, got 0 at position "
                f"{self._undrawable}: it would never be drawn and Z̃ would be biased. "
                "Smooth the counts, or name it in WithExplicit"
            )

    def restore_left_out(self, weights: Tensor) -> None:
        """Take the classes that are left out from saved weights in force; see `restored_left_out`."""
        # The parts of divided weights are saved; the classes that are left out belong to the design.
        if self._undrawable is None and self.shard is None:
            self.left_out = restored_left_out(weights, self.left_out)

    def heaviest(self, n: int) -> Tensor:
        """Return the n classes of largest weight, in ascending order."""
        return self.read().topk(n).indices.sort().values

    def without(self, ids: Tensor) -> "WeightSource":
        """Return the same weights without these classes."""
        left_out = ids if self.left_out is None else torch.cat([self.left_out, ids])
        rest = WeightSource(self.weights, power=self.power, left_out=left_out, name=self.name)
        rest._resizable = self._resizable
        return rest

    def resize(self, num_classes: int) -> None:
        """Resize the counts; raise ValueError if the weights are a tensor."""
        if not self._resizable:
            raise ValueError(
                f"`sampler` must be built from ClassCounts to be resized to {num_classes} classes, got one built from "
                "a tensor: give the head a new sampler"
            )
        if num_classes != self.weights.num_classes:
            self.weights.resize(num_classes)
        if self.left_out is not None:
            self.left_out = self.left_out[self.left_out < num_classes]


def restored_left_out(weights: Tensor, left_out: Tensor | None) -> Tensor | None:
    """Return the classes of weight 0 in saved weights in force: those that a sampler, with others so far, leaves out.

    Raises:
        ValueError: another number of classes has weight 0.
    """
    zero = (weights == 0).nonzero().squeeze(1)
    number = 0 if left_out is None else len(left_out)
    if len(zero) != number:
        raise ValueError(f"`weights` must be 0 for {number} classes, got {len(zero)}")
    return None if left_out is None else zero
