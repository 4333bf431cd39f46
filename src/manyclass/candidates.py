"""The classes that one step scores, and the number of classes that each of them stands for.

A sampler makes Candidates, a head scores them, an objective turns them into a loss. Nothing else passes between them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass._shard import Shard

# Exclusions per example that are compared with every slot; more are found by binary search. The classes of a group are
# sorted once for all of its examples, which on the CPU takes less time than several comparisons.
MAX_COMPARED = 16
MAX_COMPARED_IF_SHARED = 1


@dataclass(frozen=True)
class Block:
    """Classes that are scored together: the batch is divided into G groups of equal size, each sharing K classes.

    With G = 1 the whole batch shares them; with G = B each example has a separate draw, as in the paper. Groups are
    runs of ceil(B / G) examples, the last one padded; `order`, if given, sorts the batch into groups first.

    Args:
        ids: class ids, int64 [G, K].
        log_kappa: log of the number of classes that each slot stands for, float64 [G, K]; -inf marks an empty slot.
        order: permutation int64 [B] that sorts the batch into its groups, or None if they are runs already.
        has_targets: whether the whole batch shares the block and slot n holds the target of example n, for n < B. A
            head may then read the targets' scores from those of the block.
    """

    ids: Tensor
    log_kappa: Tensor
    order: Tensor | None = None
    has_targets: bool = field(default=False, kw_only=True)

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


def contained(ids: Tensor, others: Tensor) -> Tensor:
    """Return a bool mask [G, S, K] of the ids [G, K] of a group that are among the others [G, S, E] of an example."""
    (groups, k), (_, size, number) = ids.shape, others.shape
    shared = size > 1 and ids.device.type == "cpu"
    if number <= (MAX_COMPARED_IF_SHARED if shared else MAX_COMPARED) or k == 0:
        return (ids.reshape(groups, 1, k, 1) == others.unsqueeze(2)).any(3)
    # Binary search, because B·K·E comparisons take too much memory and time if an example excludes thousands.
    ascending, others = ids.sort(1).values, others.reshape(groups, size * number)
    place = torch.searchsorted(ascending, others)
    found = ascending.gather(1, place.clamp(max=k - 1)) == others
    # Ids that are not found mark an extra last column; both copies of a repeated class use its first position.
    hit = torch.zeros(groups, size, k + 1, dtype=torch.bool, device=ids.device)
    hit = hit.scatter(2, torch.where(found, place, k).reshape(groups, size, number), True)
    first = torch.searchsorted(ascending, ids.contiguous())
    return hit.gather(2, first.unsqueeze(1).expand(groups, size, k))


@dataclass(frozen=True)
class Candidates:
    """Output of a sampler for a batch of B targets.

    Args:
        blocks: the classes to score, ΣK slots per example.
        excluded: classes that no block may offer to an example, int64 [B, E], padded with -1: those that are not
            candidates, and those included. Scoring treats a slot of a block that holds one as empty for that example.
        target_log_kappa: returns float64 [B], minus the log of the target's expected number of draws before
            exclusion, on the scale of the slots' log κ. It is a function because few objectives use it and it is a
            large part of the cost of a draw. None if the sampler does not know it.
        num_classes: C.
        included: classes with κ = 1 for one example, each at most once, int64 [B, I]; -1 marks an empty slot. None if
            there are none. Their slots follow those of the blocks.
        is_exhaustive: whether the one block holds every class in order, with κ = 1.
        way: the way to the exact loss of an exhaustive draw, see `kernels.exact_cross_entropy`; None: its default.
        shard: the classes of this process, if they are divided: the slots are its part of the draw. None: all of them.
    """

    blocks: tuple[Block, ...]
    excluded: Tensor
    target_log_kappa: Callable[[], Tensor] | None
    num_classes: int
    included: Tensor | None = None
    is_exhaustive: bool = False
    way: str | None = None
    shard: Shard | None = None

    @property
    def batch(self) -> int:
        """The batch size, B."""
        return self.excluded.shape[0]

    def parts(self, empty: Tensor | None = None) -> tuple[Block, ...]:
        """Return the blocks, and the included classes, if any, as one more with a group for each example.

        Args:
            empty: ids [B] for the empty slots among the included ones, such as the targets, so that no further row is
                scored; None: class 0.
        """
        if self.included is None:
            return self.blocks
        is_empty = self.included < 0
        ids = torch.where(is_empty, 0 if empty is None else empty.unsqueeze(1), self.included)
        log_kappa = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        return *self.blocks, Block(ids, log_kappa.masked_fill_(is_empty, -math.inf))

    def part_of(self, shard: Shard) -> "Candidates":
        """Return the part of a process, of a draw whose blocks hold no other classes: its included classes too."""
        included = None if self.included is None else torch.where(shard.holds(self.included), self.included, -1)
        return replace(self, included=included, shard=shard)

    def ids(self) -> Tensor:
        """Return the class ids of each example's slots, int64 [B, ΣK + I]."""
        return torch.cat([block.spread(block.ids, self.batch) for block in self.parts()], 1)

    def log_kappa(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return log κ [B, ΣK + I]. Slots emptied by `excluded` are not marked here; their scores are -inf."""
        # Cast before the expansion, which costs G·K instead of B·K.
        return torch.cat([block.spread(block.log_kappa.to(dtype), self.batch) for block in self.parts()], 1)

    def hits(self, ids: Tensor) -> Tensor:
        """Return a bool mask [B, K] of the ids [B, K] that each example excludes."""
        return contained(ids, self.excluded.unsqueeze(1)).squeeze(1)

    def block_hits(self, block: Block) -> Tensor:
        """Return a bool mask [B, K] of the slots of a block that hold a class the example excludes."""
        return block.ungroup(contained(block.ids, block.group(self.excluded)), self.batch)

    def empty(self) -> Tensor:
        """Return a bool mask [B, ΣK + I] of padding, second copies and excluded classes."""
        hits = torch.cat([self.block_hits(block) for block in self.blocks], 1)
        return self.log_kappa().isneginf() | F.pad(hits, (0, 0 if self.included is None else self.included.shape[1]))
