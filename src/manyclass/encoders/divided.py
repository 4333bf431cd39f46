"""An embedding whose rows are divided among processes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass._shard import Shard


class DividedEmbedding(nn.Module):
    """A lookup of rows that lie on several processes, in place of a sparse nn.Embedding.

    All processes call it together, each with its ids, as many as it likes. Gradients are row-sparse, and means over
    processes.

    Args:
        rows: the rows of this process, with an attribute `shard` that says which ones they are. A head whose classes
            are divided may be tied to them.
    """

    def __init__(self, rows: nn.Parameter) -> None:
        super().__init__()
        self.weight = rows
        self.register_state_dict_post_hook(_wrap)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_unwrap)  # type: ignore[no-untyped-call]

    @property
    def shard(self) -> Shard:
        """The rows of this process."""
        return self.weight.shard  # type: ignore[no-any-return, attr-defined]

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows [*ids.shape, D]."""
        shard, flat = self.shard, ids.reshape(-1)
        sizes = tuple(shard.vectors(torch.tensor([len(flat)], device="cpu"))[:, 0].tolist())
        rows: Tensor = _Scattered.apply(self._part(shard.gathered(flat, sizes)), shard, sizes)  # type: ignore[no-untyped-call]
        return rows.reshape(*ids.shape, rows.shape[1])

    def _part(self, ids: Tensor) -> Tensor:
        """Return the rows of the ids that this process holds, and 0 for the others."""
        shard = self.shard
        if shard.size == 0:
            # It takes part in the exchange of gradients all the same.
            return self.weight.new_zeros(len(ids), self.weight.shape[1]).requires_grad_(torch.is_grad_enabled())
        held = shard.holds(ids)
        # The others get a row that the batch uses anyway, if there is one, so that no further row has a gradient.
        spare = ids[held.int().argmax()] if len(ids) else ids
        local = (torch.where(held, ids, spare) - shard.first).clamp(0, shard.size - 1)
        rows = shard.averaged(F.embedding(local, self.weight, sparse=True))
        return torch.where(held.unsqueeze(1), rows, 0.0)


class _Scattered(torch.autograd.Function):
    """The sum over processes, of which each gets the rows that it asked for."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, shard: Shard, sizes: Sequence[int]) -> Tensor:
        ctx.shard, ctx.sizes = shard, sizes
        return shard.scattered(partial, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shard.gathered(gradient, ctx.sizes), None, None


def _wrap(module: DividedEmbedding, state: dict[str, Any], prefix: str, _: object) -> None:
    if f"{prefix}weight" in state:
        state[f"{prefix}weight"] = module.shard.wrapped(state[f"{prefix}weight"])


def _unwrap(module: DividedEmbedding, state: dict[str, Any], prefix: str, *_: object) -> None:
    if f"{prefix}weight" in state:
        state[f"{prefix}weight"] = module.shard.unwrapped(state[f"{prefix}weight"])
