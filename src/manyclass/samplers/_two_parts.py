"""A draw in two parts: classes that examples have found, by their probability, and all others by frequency."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyclass.candidates import Block
from manyclass.samplers._cell_search import Found, places
from manyclass.samplers._comb import Comb
from manyclass.samplers._teeth import Teeth, under

MIN_PROBING_K = 2  # a class for each part
MAX_SHARE_OF_OTHERS = 0.5  # of k, for classes that no example has found
# The relative variance of Z̃ is at most Σm/n from n classes found, and about this over n from n other classes. With 16
# errors were least, or nearly, both on a trained session model and on planted classes.
VARIANCE_OF_OTHERS = 16.0


class TwoParts:
    """k slots for a line of the classes found, each as long as its π, and behind them all others by frequency.

    Classes that the draw by frequency holds for certain have separate slots. A class found is on the line twice; a
    tooth on its second place gives an empty slot. It never changes.

    Args:
        frequency: float64 [C]; a class of 0 is never drawn.
        k: the number of slots.
        mix: the share of the frequencies in the weights of the classes found.
    """

    def __init__(self, frequency: Tensor, k: int, mix: float) -> None:
        self.frequency, self.mix = frequency, mix
        # Over all classes, with the most teeth that those not found may get.
        self.comb = Comb.of(frequency, max(1, int(k * MAX_SHARE_OF_OTHERS)))
        self.teeth = Teeth(k - len(self.comb.certain), int((frequency > 0).sum()), frequency.device)

    def inclusion(self, found: Found) -> Tensor:
        """Return π of the classes found, float64 [G, N], 0 in empty places."""
        total, slots, classes = found.likelihood.sum(1, keepdim=True), self.teeth.k, len(self.frequency)
        weight = found.likelihood * ((1 - self.mix) / torch.where(total > 0, total, 1.0))
        weight.add_(self.frequency[found.ids.clamp(max=classes - 1)], alpha=self.mix)
        weight.masked_fill_(found.ids == classes, 0.0)
        # A/n + B/(slots - n) is least for n = slots √A/(√A + √B).
        length = slots * total.sqrt() / (total.sqrt() + math.sqrt(VARIANCE_OF_OTHERS))
        return self.teeth.inclusion(weight, torch.maximum(length, slots - self.comb.teeth))

    def teeth_of_others(self, pi: Tensor) -> Tensor:
        """Return the number of teeth, float64 [G, 1], that classes found with these π [G, N] leave to the others."""
        return (self.teeth.k - pi.sum(1, keepdim=True)).clamp(max=self.comb.teeth)

    def draw(
        self, target: Tensor, found: Found, generator: torch.Generator | None
    ) -> tuple[Block, Callable[[], Tensor]]:
        """Return the slots of each group, and a function that returns log κ of the targets [B]."""
        # The function below may be called much later, and keeps no more than it needs.
        comb, pi, found_ids = self.comb, self.inclusion(found), found.ids
        length, teeth = pi.sum(1, keepdim=True), self.teeth_of_others(pi)
        position = self.teeth.positions(len(pi), generator)
        place, log_kappa = under(position, pi)
        # An empty place has π = 0 and is never under a tooth; one beyond the end is empty whatever its id.
        ids = found_ids.gather(1, place).clamp_(max=len(self.frequency) - 1)
        if comb.teeth:
            other_ids, other_log_kappa = comb.under((position - length) / teeth, teeth)
            other_log_kappa = other_log_kappa.masked_fill(places(found_ids, other_ids)[1], -math.inf)
            is_other = position >= length
            ids, log_kappa = torch.where(is_other, other_ids, ids), torch.where(is_other, other_log_kappa, log_kappa)
        certain = comb.certain.expand(len(pi), -1).contiguous()
        certain_log_kappa = torch.zeros_like(certain, dtype=log_kappa.dtype)
        certain_log_kappa = certain_log_kappa.masked_fill_(places(found_ids, certain)[1], -math.inf)
        block = Block(torch.cat([certain, ids], 1), torch.cat([certain_log_kappa, log_kappa], 1))

        def target_log_kappa() -> Tensor:
            grouped = block.group(target)
            place, is_found = places(found_ids, grouped)
            log_kappa = torch.where(is_found, -pi.gather(1, place).log(), comb.log_kappa(grouped, teeth))
            return block.ungroup(log_kappa, len(target))

        return block, target_log_kappa
