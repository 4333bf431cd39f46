"""The classes one step scores, and how many classes each of them stands for.

A sampler makes Candidates, a head scores them, an objective turns scores and weights into a loss. Nothing else
passes between the three, so they need not know each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW = 16  # classes excluded by each example, up to which they are compared one by one


@dataclass(frozen=True)
class Block:
    """Classes that are scored together: the batch falls into G groups of equal size, each sharing K classes.

    G = 1 shares them in the whole batch, G = B draws for each example by itself, as the paper does. Groups are runs
    of ceil(B / G) examples, the last one padded; `order`, where given, sorts the batch into them.

    Args:
        ids: int64 [G, K].
        log_kappa: float64 [G, K], the log of how many classes each slot stands for; -inf marks an empty slot.
        order: int64 [B] or None, the permutation that sorts the batch into its groups where they are not runs.
    """

    ids: Tensor
    log_kappa: Tensor
    order: Tensor | None = None

    def group(self, x: Tensor) -> Tensor:
        """[B, ...] in the batch's order to [G, ceil(B / G), ...]."""
        groups, batch = self.ids.shape[0], x.shape[0]
        size = -(-batch // groups)
        if self.order is not None:
            x = x.index_select(0, self.order)
        if groups * size > batch:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, groups * size - batch))
        return x.reshape(groups, size, *x.shape[1:])

    def ungroup(self, x: Tensor, batch: int) -> Tensor:
        """[G, ceil(B / G), ...] back to [B, ...] in the batch's order."""
        x = x.flatten(0, 1)[:batch]
        return x if self.order is None else x.index_select(0, self.order.argsort())

    def spread(self, x: Tensor, batch: int) -> Tensor:
        """[G, K] to [B, K]: each example's view of what its group shares."""
        groups = x.shape[0]
        if groups == 1:
            return x.expand(batch, -1)
        if groups == batch and self.order is None:
            return x
        size = -(-batch // groups)
        return self.ungroup(x.unsqueeze(1).expand(-1, size, -1), batch)


def join(*blocks: Block) -> tuple[Block, ...]:
    """The same blocks with neighbours that share their grouping put into one, so that one product scores them."""
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
    """Explicit classes [n], κ = 1, beside a block: in it where the whole batch shares it, else as one of their own."""
    number = explicit.shape[0]
    if number == 0:
        return (block,)
    ids = explicit.unsqueeze(0)
    if block.ids.shape[0] == 1:
        # log κ = 0 is what padding fills in.
        return (Block(torch.cat([ids, block.ids], 1), F.pad(block.log_kappa, (number, 0))),)
    return Block(ids, block.log_kappa.new_zeros(ids.shape)), block


@dataclass(frozen=True)
class Candidates:
    """What a sampler answers for a batch of B targets.

    Args:
        blocks: the classes to score; ΣK slots for each example.
        excluded: int64 [B, E], -1 pads: classes that are no candidates for that example. A slot that holds one
            counts as empty for it; scoring sees to that.
        target_log_kappa: gives float64 [B], minus the log of how often the target was expected to be drawn before
            exclusion, scaled as the slots' own. A function, since few objectives ask for it and it is a good part of
            the cost of a draw. None where the sampler cannot say.
        num_classes: C.
    """

    blocks: tuple[Block, ...]
    excluded: Tensor
    target_log_kappa: Callable[[], Tensor] | None
    num_classes: int

    @property
    def batch(self) -> int:
        return self.excluded.shape[0]

    def ids(self) -> Tensor:
        """int64 [B, ΣK]: the slots as each example sees them."""
        return torch.cat([block.spread(block.ids, self.batch) for block in self.blocks], 1)

    def log_kappa(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """[B, ΣK] in the dtype asked for. Slots emptied by `excluded` are not marked here, their scores are -inf."""
        # The cast comes before the spread: it then costs G·K and not B·K.
        return torch.cat([block.spread(block.log_kappa.to(dtype), self.batch) for block in self.blocks], 1)

    def hits(self, ids: Tensor) -> Tensor:
        """bool [B, K]: which of the ids [B, K] each example excludes."""
        excluded = self.excluded
        if excluded.shape[1] <= _FEW or not ids.shape[1]:
            return (ids.unsqueeze(2) == excluded.unsqueeze(1)).any(2)
        # By search: B·K·E comparisons would neither fit into memory nor end where an example excludes thousands.
        ascending = ids.sort(1).values
        place = torch.searchsorted(ascending, excluded.contiguous())
        found = ascending.gather(1, place.clamp(max=ids.shape[1] - 1)) == excluded
        # What is not found marks a column of its own; of a class that comes twice, its first place answers for both.
        hit = torch.zeros(len(ids), ids.shape[1] + 1, dtype=torch.bool, device=ids.device)
        hit.scatter_(1, torch.where(found, place, ids.shape[1]), True)
        return hit.gather(1, torch.searchsorted(ascending, ids.contiguous()))

    def empty(self) -> Tensor:
        """bool [B, ΣK]: padding, second copies and excluded classes."""
        return self.log_kappa().isneginf() | self.hits(self.ids())
