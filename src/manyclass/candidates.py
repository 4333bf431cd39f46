"""The classes that one step scores, and the number of classes that each of them stands for.

A sampler makes Candidates, a head scores them, an objective turns them into a loss. Nothing else passes between them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_COMPARED_EXCLUSIONS = 16  # per example; more are found by binary search


@dataclass(frozen=True)
class Block:
    """Classes that are scored together: the batch is divided into G groups of equal size, each sharing K classes.

    With G = 1 the whole batch shares them; with G = B each example has a separate draw, as in the paper. Groups are
    runs of ceil(B / G) examples, the last one padded; `order`, if given, sorts the batch into groups first.

    Args:
        ids: class ids, int64 [G, K].
        log_kappa: log of the number of classes that each slot stands for, float64 [G, K]; -inf marks an empty slot.
        order: permutation int64 [B] that sorts the batch into its groups, or None if they are runs already.
    """

    ids: Tensor
    log_kappa: Tensor
    order: Tensor | None = None

    def group(self, x: Tensor) -> Tensor:
        """Arrange [B, ...] in batch order as [G, ceil(B / G), ...]."""
        groups, batch = self.ids.shape[0], x.shape[0]
        size = -(-batch // groups)
        if self.order is not None:
            x = x.index_select(0, self.order)
        if groups * size > batch:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, groups * size - batch))
        return x.reshape(groups, size, *x.shape[1:])

    def ungroup(self, x: Tensor, batch: int) -> Tensor:
        """Arrange [G, ceil(B / G), ...] as [B, ...] in batch order."""
        x = x.flatten(0, 1)[:batch]
        return x if self.order is None else x.index_select(0, self.order.argsort())

    def spread(self, x: Tensor, batch: int) -> Tensor:
        """Expand [G, K] to [B, K]: each example gets the row of its group."""
        groups = x.shape[0]
        if groups == 1:
            return x.expand(batch, -1)
        if groups == batch and self.order is None:
            return x
        size = -(-batch // groups)
        return self.ungroup(x.unsqueeze(1).expand(-1, size, -1), batch)


def join(*blocks: Block) -> tuple[Block, ...]:
    """Merge neighbouring blocks with the same grouping, so that one matrix product scores them."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.ids.shape[0] == block.ids.shape[0] and last.order is block.order:
            ids = torch.cat([last.ids, block.ids], 1)
            joined[-1] = Block(ids, torch.cat([last.log_kappa, block.log_kappa], 1), block.order)
        else:
            joined.append(block)
    return tuple(joined)


def put_in_front(explicit: Tensor, block: Block) -> tuple[Block, ...]:
    """Add explicit classes [n] with κ = 1: to the block if the whole batch shares it, else as a separate block."""
    number = explicit.shape[0]
    if number == 0:
        return (block,)
    ids = explicit.unsqueeze(0)
    if block.ids.shape[0] == 1:
        # Padding fills in 0, which is log κ of an explicit class.
        return (Block(torch.cat([ids, block.ids], 1), F.pad(block.log_kappa, (number, 0))),)
    return Block(ids, block.log_kappa.new_zeros(ids.shape)), block


@dataclass(frozen=True)
class Candidates:
    """Output of a sampler for a batch of B targets.

    Args:
        blocks: the classes to score, ΣK slots per example.
        excluded: classes that are not candidates for an example, int64 [B, E], padded with -1. Scoring treats a slot
            that holds one as empty for that example.
        target_log_kappa: returns float64 [B], minus the log of the target's expected number of draws before
            exclusion, on the scale of the slots' log κ. It is a function because few objectives use it and it is a
            large part of the cost of a draw. None if the sampler does not know it.
        num_classes: C.
        is_exhaustive: whether the one block holds every class in order, with κ = 1.
        way: the way to the exact loss of an exhaustive draw, see `kernels.exact_cross_entropy`; None: its default.
    """

    blocks: tuple[Block, ...]
    excluded: Tensor
    target_log_kappa: Callable[[], Tensor] | None
    num_classes: int
    is_exhaustive: bool = False
    way: str | None = None

    @property
    def batch(self) -> int:
        """The batch size, B."""
        return self.excluded.shape[0]

    def ids(self) -> Tensor:
        """Return the class ids of each example's slots, int64 [B, ΣK]."""
        return torch.cat([block.spread(block.ids, self.batch) for block in self.blocks], 1)

    def log_kappa(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return log κ [B, ΣK]. Slots emptied by `excluded` are not marked here; their scores are -inf."""
        # Cast before the expansion, which costs G·K instead of B·K.
        return torch.cat([block.spread(block.log_kappa.to(dtype), self.batch) for block in self.blocks], 1)

    def hits(self, ids: Tensor) -> Tensor:
        """Return a bool mask [B, K] of the ids [B, K] that each example excludes."""
        excluded = self.excluded
        if excluded.shape[1] <= MAX_COMPARED_EXCLUSIONS or not ids.shape[1]:
            return (ids.unsqueeze(2) == excluded.unsqueeze(1)).any(2)
        # Binary search, because B·K·E comparisons take too much memory and time if an example excludes thousands.
        ascending = ids.sort(1).values
        place = torch.searchsorted(ascending, excluded.contiguous())
        found = ascending.gather(1, place.clamp(max=ids.shape[1] - 1)) == excluded
        # Ids that are not found mark an extra last column; both copies of a repeated class use its first position.
        hit = torch.zeros(len(ids), ids.shape[1] + 1, dtype=torch.bool, device=ids.device)
        hit.scatter_(1, torch.where(found, place, ids.shape[1]), True)
        return hit.gather(1, torch.searchsorted(ascending, ids.contiguous()))

    def empty(self) -> Tensor:
        """Return a bool mask [B, ΣK] of padding, second copies and excluded classes."""
        return self.log_kappa().isneginf() | self.hits(self.ids())
