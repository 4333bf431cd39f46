"""Exact normaliser, probabilities and top-k, in chunks of classes so that no [B, C] matrix is ever held."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyclass import _check
from manyclass.heads._batch import wide

_CHUNK = 1 << 24  # scores held at once
_ROWS = 1 << 10  # examples at once where no gradient is wanted: results of many chunks are kept for each
_FEW = 1 << 8  # examples that a chunk of classes is cut for at least: their vectors may be copied, to be normalised


class TopK(NamedTuple):
    """The classes of highest probability, best first.

    Args:
        log_prob: [..., k] exact log-probabilities; -inf where fewer than k classes were left.
        ids: int64 [..., k].
    """

    log_prob: Tensor
    ids: Tensor


class ChunkedHead(Protocol):
    """A head that can score all classes, some at a time."""

    @property
    def num_classes(self) -> int: ...

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """For each run of `size` classes its first id and a function from hidden [B, ...] to scores [B, size]."""
        ...


def _chunks(head: ChunkedHead, batch: int, exclude: Tensor | None) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    for start, score in head.score_chunks(max(1, _CHUNK // max(batch, _FEW))):

        def masked(hidden: Tensor, start: int = start, score: Callable[[Tensor], Tensor] = score) -> Tensor:
            scores = wide(score(hidden))
            return scores if exclude is None else mask_places(scores, exclude - start)

        yield start, masked


def mask_places(scores: Tensor, place: Tensor) -> Tensor:
    """Scores [B, n] with -inf at the places [B, E] that lie in [0, n)."""
    n = scores.shape[1]
    # What lies outside goes to a column of its own, which is cut off.
    place = torch.where((place >= 0) & (place < n), place, n)
    hit = torch.zeros(len(scores), n + 1, dtype=torch.bool, device=scores.device).scatter_(1, place, True)
    return scores.masked_fill(hit[:, :n], -math.inf)


def log_z(head: ChunkedHead, hidden: Tensor, exclude: Tensor | None = None, *, power: float = 1.0) -> Tensor:
    """log Σ u^power [B] of hidden [B, ...] over all classes that are not excluded, log Z at power 1.

    Differentiable; chunks are scored again in the backward pass rather than kept.
    """
    if len(hidden) > _ROWS and not torch.is_grad_enabled():
        return torch.cat([log_z(head, *rows, power=power) for rows in _row_chunks(hidden, exclude)])
    parts = []
    for _, score in _chunks(head, len(hidden), exclude):

        def part(hidden: Tensor, score: Callable[[Tensor], Tensor] = score) -> Tensor:
            scores = score(hidden)
            return (scores if power == 1 else power * scores).logsumexp(1)

        if torch.is_grad_enabled():
            parts.append(checkpoint(part, hidden, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(part(hidden))
    return torch.stack(parts).logsumexp(0)


@torch.no_grad()
def topk(head: ChunkedHead, hidden: Tensor, k: int, exclude: Tensor | None = None) -> TopK:
    """The k best classes [B, k] of hidden [B, ...] that are not excluded. Probabilities are over all classes."""
    _check.whole("k", k, 1, head.num_classes)
    if exclude is not None:
        if exclude.dim() != 2 or len(exclude) != len(hidden):
            raise ValueError(f"`exclude` must have shape [{len(hidden)}, E], got {list(exclude.shape)}")
        _check.device("exclude", exclude, hidden.device)
    found = [_topk(head, rows, k, others) for rows, others in _row_chunks(hidden, exclude)]
    log_prob, ids = zip(*found, strict=True)
    return TopK(torch.cat(log_prob), torch.cat(ids))


def _row_chunks(hidden: Tensor, exclude: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    rows = hidden.split(_ROWS)
    return zip(rows, [None] * len(rows) if exclude is None else exclude.split(_ROWS), strict=True)


def _topk(head: ChunkedHead, hidden: Tensor, k: int, exclude: Tensor | None) -> TopK:
    best = hidden.new_empty(len(hidden), 0, dtype=torch.float32)
    ids = torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device)
    parts = []
    for start, score in _chunks(head, len(hidden), None):
        scores = score(hidden)
        parts.append(scores.logsumexp(1))
        if exclude is not None:
            scores = mask_places(scores, exclude - start)
        chunk, place = scores.topk(min(k, scores.shape[1]), dim=1)
        best = torch.cat([best.to(chunk.dtype), chunk], 1)
        ids = torch.cat([ids, place + start], 1)
        best, place = best.topk(min(k, best.shape[1]), dim=1)
        ids = ids.gather(1, place)
    return TopK(best - torch.stack(parts).logsumexp(0).unsqueeze(1), ids)
