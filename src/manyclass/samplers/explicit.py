"""An explicit sum over classes other than the target, and a sampler for the rest."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._plain_state import load_state, move_state, save_state, saved_ids
from manyclass._shard import Shard
from manyclass.candidates import Block, Candidates, join
from manyclass.kernels import cpu
from manyclass.samplers._sampler import (
    AdjustableSampler,
    Observation,
    Sampler,
    SubsetSampler,
    checked_draw,
    divide,
    replayable,
)


class WithExplicit(nn.Module):
    """An explicit set that every example sums with κ = 1, and a sampler for all other classes.

    Args:
        sampler: draws the rest; None: only the set is summed (Jean et al. 2015), and Z̃ is biased.
        explicit: ids of a fixed set, or "batch": the classes of the minibatch's targets.
        num_classes: C, needed without a sampler.

    Raises:
        ValueError: an id is repeated or out of range; the set is empty; `num_classes` is missing or not the sampler's.

    Example:
        >>> from manyclass.samplers import Importance
        >>> sampler = WithExplicit(Importance(torch.ones(9), k=1), torch.tensor([0, 1]))
        >>> candidates = sampler(torch.tensor([5]), generator=torch.Generator().manual_seed(0))
        >>> candidates.log_kappa().exp().round()
        tensor([[1., 1., 7.]], dtype=torch.float64)
    """

    saved = ("explicit",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(self, sampler: Sampler | None, explicit: Tensor | str, *, num_classes: int | None = None) -> None:
        super().__init__()
        if sampler is None and num_classes is None:
            raise ValueError("`num_classes` must be given if `sampler` is None, got None")
        if sampler is not None and num_classes not in (None, sampler.num_classes):
            raise ValueError(f"`num_classes` must be the sampler's {sampler.num_classes}, got {num_classes}")
        self._num_classes = None if num_classes is None else _check.integer("num_classes", num_classes, 1)
        self.sampler = sampler
        self.shard: Shard | None = None
        self._explicit: Tensor | None = None
        # If the sampler can leave the set out, no draw is wasted on it.
        self._leaves_out = False
        if isinstance(explicit, Tensor):
            self._explicit = _distinct(explicit, self.num_classes)
            if isinstance(sampler, SubsetSampler):
                self.sampler = sampler.without(self._explicit)
                self._leaves_out = True
        else:
            _check.choice("explicit", explicit, ("batch",))

    @classmethod
    def budget(cls, sampler: SubsetSampler, total: int) -> "WithExplicit":
        """Score `total` classes: the sampler's k drawn, and the heaviest of its classes explicit for the remainder.

        Args:
            sampler: a sampler that can leave classes out; its k is the part that is drawn.
            total: the budget T; T - k classes are explicit.

        Raises:
            ValueError: `sampler` has no k, or `total` is outside (k, C].
        """
        if sampler.k is None:
            raise ValueError("`sampler` must have a `k` to split a budget, got one built from probabilities")
        _check.integer("total", total, sampler.k + 1, sampler.num_classes)
        return cls(sampler, sampler.heaviest(total - sampler.k))

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        if self.sampler is not None:
            return self.sampler.num_classes
        assert self._num_classes is not None
        return self._num_classes

    @property
    def device(self) -> torch.device | None:
        """The device of its tables."""
        if self._explicit is not None:
            return self._explicit.device
        return None if self.sampler is None else self.sampler.device

    @property
    def explicit(self) -> Tensor:
        """int64 [n]: the ids of the set, ascending; [0] if it is the batch's targets."""
        return torch.empty(0, dtype=torch.int64, device="cpu") if self._explicit is None else self._explicit

    def move(self, device: torch.device) -> None:
        """Move the set to a device."""
        self._explicit = None if self._explicit is None else self._explicit.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue with a saved set of as many classes."""
        explicit = saved_ids("explicit", state["explicit"], self.num_classes, length=len(self.explicit))
        self._explicit = None if self._explicit is None else explicit

    renormalises = property(lambda self: self.sampler is not None and self.sampler.renormalises)
    unbiased = property(lambda self: self.sampler is not None and self.sampler.unbiased)
    learns = property(lambda self: self.sampler is not None and self.sampler.learns)

    @property
    def k(self) -> int | None:
        """The number of classes that the inner sampler draws; None if it cannot be changed."""
        return self.sampler.k if isinstance(self.sampler, AdjustableSampler) else None

    def set_k(self, k: int) -> None:
        """Let the inner sampler draw another number of classes; raise ValueError if its k is fixed."""
        if not isinstance(self.sampler, AdjustableSampler):
            raise ValueError(f"`k` must not be set for a {type(self.sampler).__name__}, whose k is fixed, got {k}")
        self.sampler.set_k(k)

    def divide(self, shard: Shard) -> None:
        """Keep the drawn classes of this process alone; the set stays whole."""
        if self.sampler is not None:
            divide(self.sampler, shard)
        self.shard = shard

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Attach class vectors to the inner sampler."""
        if self.sampler is not None:
            self.sampler.attach(weight, bias)

    def advance(self) -> None:
        """Count a training step in the inner sampler."""
        if self.sampler is not None:
            self.sampler.advance()

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments."""
        if self.sampler is None:
            return Candidates(self._in_front(target, ()), exclude, None, self.num_classes)
        left = exclude
        if self.sampler.renormalises and not self._leaves_out:
            explicit = target if self._explicit is None else self._explicit
            left = torch.cat([exclude, explicit.expand(target.shape[0], -1)], 1)
        rest = self.sampler.draw(target, left, hidden=hidden, generator=generator)
        drawn = rest.target_log_kappa
        return Candidates(
            self._in_front(target, rest.blocks),
            # A class that the sampler includes for an example is emptied in the set too, so that it counts once.
            exclude if rest.included is None else torch.cat([exclude, rest.included], 1),
            None if drawn is None else lambda: self._log_kappa(target, drawn),
            self.num_classes,
            rest.included,
        )

    def _in_front(self, target: Tensor, drawn: tuple[Block, ...]) -> tuple[Block, ...]:
        """Return the explicit set, and the drawn blocks without it."""
        single = self._explicit is None and len(drawn) == 1 and drawn[0].ids.shape[0] == 1
        if single and self.shard is None and cpu.is_available(target):
            return (Block(*cpu.put_in_front(target, drawn[0].ids, drawn[0].log_kappa)),)
        block = self._block(target)
        if not self._leaves_out:
            drawn = tuple(_empty_within(part, block.ids[0]) for part in drawn)
        return join(block if self.shard is None else _held(block, self.shard), *drawn)

    def _block(self, target: Tensor) -> Block:
        """Return the explicit set [1, n], in ascending order; repeated targets count once."""
        explicit = target.sort().values if self._explicit is None else self._explicit
        log_kappa = torch.zeros(explicit.shape, dtype=torch.float64, device=target.device)
        if self._explicit is None:
            log_kappa[1:].masked_fill_(explicit[1:] == explicit[:-1], -math.inf)
        return Block(explicit.unsqueeze(0), log_kappa.unsqueeze(0))

    def _log_kappa(self, target: Tensor, drawn: Callable[[], Tensor]) -> Tensor:
        """Return log κ of the targets: 0 for those in the set, which with "batch" are all."""
        if self._explicit is None:
            return torch.zeros(target.shape, dtype=torch.float64, device=target.device)
        return drawn().masked_fill(_within(target, self._explicit), 0.0)

    def observe(self, observation: Observation) -> None:
        """Show the inner sampler its part of the draw; slots emptied by the explicit set have κ = 0 there."""
        if self.sampler is None:
            return
        candidates = observation.candidates
        first, *others = candidates.blocks
        explicit = candidates.batch if self._explicit is None else len(self._explicit)
        if self.shard is not None and self.shard.size == 0:
            explicit = 0
        drawn = Block(first.ids[:, explicit:], first.log_kappa[:, explicit:], first.order)
        blocks = (drawn, *others) if drawn.ids.shape[1] else tuple(others)
        inner = replace(candidates, blocks=blocks)
        self.sampler.observe(
            replace(observation, candidates=inner, probability=lambda: observation.probability()[explicit:])
        )

    def is_settled(self, draws: int) -> bool:
        """Return True if the inner sampler is settled."""
        return self.sampler is None or replayable(self.sampler).is_settled(draws)

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the set, and what the inner sampler pins."""
        inner = () if self.sampler is None else replayable(self.sampler).pinned(compiled=compiled)
        return self._explicit, *inner

    def refresh(self) -> None:
        """Rebuild the inner sampler from its counts; the explicit set stays."""
        if self.sampler is not None:
            self.sampler.refresh()

    def resize(self, num_classes: int) -> None:
        """Change the number of classes; explicit classes that are retired leave the set."""
        _check.integer("num_classes", num_classes, 1)
        kept = None if self._explicit is None else self._explicit[self._explicit < num_classes]
        if kept is not None and len(kept) == 0:
            raise ValueError(f"`num_classes` must leave one explicit class, got {num_classes}")
        # The inner sampler first: if it cannot be resized, nothing has changed yet.
        if self.sampler is not None:
            self.sampler.resize(num_classes)
        self._explicit = kept
        self._num_classes = num_classes

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return "explicit='batch'" if self._explicit is None else f"explicit={len(self._explicit)} classes"


def _distinct(explicit: Tensor, num_classes: int) -> Tensor:
    ids = _check.ids("explicit", _check.values("explicit", explicit), num_classes)
    if ids.dim() != 1 or len(ids) == 0:
        raise ValueError(f"`explicit` must be a vector of at least one class, got shape {list(ids.shape)}")
    ids, order = ids.sort()
    repeated = ids[1:] == ids[:-1]
    if repeated.any():
        first = int(repeated.nonzero()[0])
        raise ValueError(f"`explicit` must not repeat a class, got {ids[first]} at position {order[first + 1]} again")
    return ids


def _within(ids: Tensor, ascending: Tensor) -> Tensor:
    """Return bool of the shape of `ids`: True for those in the ascending vector."""
    place = torch.searchsorted(ascending, ids.contiguous()).clamp_(max=ascending.shape[0] - 1)
    return ascending.take(place) == ids


def _held(block: Block, shard: Shard) -> Block:
    """Return a block [1, n] of ascending ids in which the slots of classes that other processes hold are empty."""
    held = shard.holds(block.ids)
    if shard.size == 0:
        return Block(block.ids[:, :0], block.log_kappa[:, :0])
    # An empty slot holds another class of the block, so that no further row gets a gradient.
    before, number = (block.ids < shard.first).sum(), held.sum()
    place = torch.arange(held.shape[1], device=held.device).clamp(min=before, max=before + number - 1).clamp_(min=0)
    ids = block.ids[:, place]
    # If none of them is held, the first class that is.
    ids = torch.where(shard.holds(ids), ids, shard.first)
    return Block(ids, block.log_kappa.masked_fill(~held, -math.inf))


def _empty_within(block: Block, ascending: Tensor) -> Block:
    log_kappa = block.log_kappa.masked_fill(_within(block.ids, ascending), -math.inf)
    return Block(block.ids, log_kappa, block.order)
