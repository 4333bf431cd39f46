"""Scores and exact results of a head whose classes are divided among processes."""

from typing import Protocol

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass._shard import Shard
from manyclass.candidates import Candidates
from manyclass.forms import Similarity
from manyclass.heads._together import query_together
from manyclass.heads.exact import ChunkedHead, TopK, exact_log_z, exact_scores, exact_topk, zeros_of
from manyclass.kernels import at_least_float32, directions, exclude_hits, linear_scores


class DividedHead(ChunkedHead, Protocol):
    """A head with the class vectors of one process."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def _similarity(self) -> Similarity: ...

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def _pair(self, hidden: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor: ...


def scores_of_part(
    head: DividedHead, shard: Shard, hidden: Tensor, target: Tensor, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """Return scores of the targets [B], and of the slots of this process [B, ΣK + I], -inf where excluded.

    Args:
        head: the head.
        shard: the classes of this process.
        hidden: [B, D], of all processes.
        target: int64 [B].
        candidates: the part of the draw of this process.
    """
    blocks = candidates.parts()
    if shard.size == 0:
        nothing = zeros_of(head, hidden)
        width = sum(block.ids.shape[1] for block in blocks)
        return shard.total(nothing), nothing.unsqueeze(1).expand(-1, width) - torch.inf
    ids = torch.cat([target, *(block.ids.reshape(-1) for block in blocks)])
    empty = torch.cat(
        [torch.zeros_like(target, dtype=torch.bool), *(b.log_kappa.isneginf().reshape(-1) for b in blocks)]
    )
    # Empty slots and targets of other processes get the row of another one: a row that no slot scores must have no
    # gradient, not even 0, by which an optimiser with momentum would move it.
    used = shard.holds(ids) & ~empty
    other = ids[used.to(torch.uint8).argmax()]
    local = (torch.where(used, ids, other) - shard.first).clamp(0, shard.size - 1)
    held = used[: len(target)]
    # One lookup for all, so that there is one gradient.
    rows, bias = head.lookup(local)
    rows, bias = shard.averaged(rows), None if bias is None else shard.averaged(bias)
    sizes = [len(target), *(block.ids.numel() for block in blocks)]
    target_rows, *block_rows = rows.split(sizes)
    target_bias, *biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    target_score = shard.total(torch.where(held, head._pair(hidden, target_rows, target_bias), 0.0))
    hidden = directions(hidden, head._similarity)
    scores = [
        linear_scores(hidden, directions(part, head._similarity, scaled=False), part_bias, block)
        for block, part, part_bias in zip(blocks, block_rows, biases, strict=True)
    ]
    return target_score, exclude_hits(scores, candidates)


def scores_together(head: DividedHead, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the scores [..., K] of the hidden vectors [..., D] of this process for ids [..., K] or [K]."""
    return _of_ids(head, hidden, ids, normalised=False)


def log_prob_together(head: DividedHead, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the exact log-probabilities [..., K] of the hidden vectors of this process for ids [..., K] or [K]."""
    return _of_ids(head, hidden, ids, normalised=True)


def _of_ids(head: DividedHead, hidden: Tensor, ids: Tensor, *, normalised: bool) -> Tensor:
    shape = hidden.shape[:-1]
    if ids.dim() == 0 or ids.shape[:-1] not in ((), shape):
        raise ValueError(f"`ids` must have shape {[*shape, 'K']} or [K], got {list(ids.shape)}")
    ids = ids.expand(*shape, ids.shape[-1])

    def answer(hidden: Tensor, ids: Tensor | None) -> tuple[Tensor, ...]:
        assert ids is not None
        scores, log_z = exact_scores(head, hidden, ids) if normalised else (shared_scores(head, hidden, ids), None)
        return (scores if log_z is None else scores - log_z.unsqueeze(1),)

    assert head.shard is not None
    flat = ids.reshape(-1, ids.shape[-1])
    (found,) = query_together(head.shard, hidden.reshape(-1, hidden.shape[-1]), flat, answer)
    return found[:, : ids.shape[-1]].reshape(ids.shape)


def shared_scores(head: DividedHead, hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the scores [B, K] of the hidden vectors [B, D] of all processes for ids [B, K]."""
    shard = head.shard
    assert shard is not None
    if shard.size == 0:
        return shard.total(zeros_of(head, hidden).unsqueeze(1).expand(ids.shape))
    held = shard.holds(ids)
    rows, bias = head.lookup(torch.where(held, ids - shard.first, 0))
    rows, bias = shard.averaged(rows), None if bias is None else shard.averaged(bias)
    return shard.total(torch.where(held, head._pair(hidden.unsqueeze(1), rows, bias), 0.0))


def scores_of_classes(head: DividedHead, hidden: Tensor, classes: Tensor) -> Tensor:
    """Return the scores [B, U] of the hidden vectors [B, D] of all processes for classes [U] of this process.

    Of a head that is not divided, those of any classes.
    """
    if head.shard is not None and head.shard.size == 0:
        return at_least_float32(hidden[:, :0])
    rows, bias = head.lookup(classes if head.shard is None else classes - head.shard.first)
    scores = directions(hidden, head._similarity) @ directions(rows, head._similarity, scaled=False).T
    return at_least_float32(scores if bias is None else scores + bias)


def log_z_together(head: DividedHead, hidden: Tensor) -> Tensor:
    """Return the exact log Z [N] of the hidden vectors [N, D] of this process."""
    assert head.shard is not None
    (found,) = query_together(head.shard, hidden, None, lambda shared, _: (exact_log_z(head, shared),))
    return found


@torch.no_grad()
def topk_together(head: DividedHead, hidden: Tensor, k: int, exclude: Tensor | None) -> TopK:
    """Return the k most probable classes of the hidden vectors [N, D] of this process, not among exclude [N, E]."""
    assert head.shard is not None
    _check.integer("k", k, 1, head.num_classes)
    none = torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device)
    given = none if exclude is None else exclude
    best = query_together(head.shard, hidden, given, lambda shared, ids: exact_topk(head, shared, k, ids))
    return TopK(*best)
