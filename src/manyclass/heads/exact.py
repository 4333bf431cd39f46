"""Exact normaliser and top-k, in chunks of classes so that no [B, C] matrix is ever held."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyclass import _check
from manyclass._context import is_functional
from manyclass._shard import Shard
from manyclass.kernels import at_least_float32, mask_columns

MAX_SCORES = 1 << 24  # held in memory at once
MAX_EXAMPLES = 1 << 10  # scored at once without gradients, since the results of many chunks are kept for each
MIN_EXAMPLES = 1 << 8  # a chunk of classes is no larger than for this batch size: normalising copies its vectors


class TopK(NamedTuple):
    """Classes of highest probability, best first.

    Args:
        log_prob: [..., k] exact log-probabilities; -inf if fewer than k classes were left.
        ids: int64 [..., k].
    """

    log_prob: Tensor
    ids: Tensor


class ChunkedHead(Protocol):
    """A head that can score all classes, a chunk at a time."""

    @property
    def num_classes(self) -> int: ...

    @property
    def shard(self) -> Shard | None:
        """The classes of this process, if they are divided; then hidden vectors are those of all processes."""
        ...

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """Yield for each run of `size` classes its first id and a function from hidden [B, ...] to scores [B, size]."""
        ...


class HeadWithVectors(ChunkedHead, Protocol):
    """A head with class vectors, whose classes may be divided among processes."""

    @property
    def class_vectors(self) -> tuple[Tensor | None, Tensor | None]:
        """The weight and bias, if there are any."""
        ...


def _chunks(head: ChunkedHead, batch: int, exclude: Tensor | None) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    # The chunks of a traced graph must not depend on the batch size, which would then be a constant of the graph.
    batch = MAX_EXAMPLES if torch.compiler.is_compiling() else max(batch, MIN_EXAMPLES)
    for start, score in head.score_chunks(max(1, MAX_SCORES // batch)):

        def masked(hidden: Tensor, start: int = start, score: Callable[[Tensor], Tensor] = score) -> Tensor:
            scores = at_least_float32(score(hidden))
            return scores if exclude is None else mask_columns(scores, exclude - start)

        yield start, masked


def exact_log_z(head: ChunkedHead, hidden: Tensor, exclude: Tensor | None = None, *, power: float = 1.0) -> Tensor:
    """Return log Σ u^power [B] of hidden [B, ...] over all classes that are not excluded: log Z at power 1.

    Differentiable; the backward pass scores chunks again instead of keeping them.
    """
    none = torch.empty(hidden.shape[0], 0, dtype=torch.int64, device=hidden.device)
    return exact_scores(head, hidden, none, exclude, power=power)[1]


def exact_scores(
    head: ChunkedHead, hidden: Tensor, ids: Tensor, exclude: Tensor | None = None, *, power: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the scores [B, K] of ids [B, K] and log Z [B], both from the same products; see `exact_log_z`.

    A score that is computed in another way is rounded in another way, and may lie above log Z. These cannot: rounding
    is monotonic, so a log-sum-exp is never below any of its terms.
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and hidden.shape[0] > MAX_EXAMPLES:
        rows = zip(_row_chunks(hidden, exclude), ids.split(MAX_EXAMPLES), strict=True)
        found = [exact_scores(head, part, wanted, others, power=power) for (part, others), wanted in rows]
        own, log_z = zip(*found, strict=True)
        return torch.cat(own), torch.cat(log_z)
    own_score, parts = None, []
    for start, score in _chunks(head, hidden.shape[0], exclude):

        def part(
            hidden: Tensor, columns: Tensor = ids - start, score: Callable[[Tensor], Tensor] = score
        ) -> tuple[Tensor, Tensor]:
            scores = score(hidden)
            inside = (columns >= 0) & (columns < scores.shape[1])
            chosen = scores.gather(1, torch.where(inside, columns, 0))
            log_sum = (scores if power == 1 else power * scores).logsumexp(1)
            return torch.where(inside, chosen, 0.0), log_sum

        # torch.export and torch.func cannot trace a checkpoint.
        if torch.is_grad_enabled() and not torch.compiler.is_exporting() and not is_functional():
            chosen, log_sum = checkpoint(part, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            chosen, log_sum = part(hidden)
        own_score = chosen if own_score is None else own_score + chosen
        parts.append(log_sum)
    if own_score is None or head.shard is not None:
        return _over_processes(head, hidden, ids, own_score, parts)
    return own_score, torch.stack(parts).logsumexp(0)


def _over_processes(
    head: ChunkedHead, hidden: Tensor, ids: Tensor, own_score: Tensor | None, parts: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return scores [B, K] and log Z [B] from the parts of all processes."""
    shard = head.shard
    assert shard is not None
    if own_score is None:
        nothing = zeros_of(head, hidden)
        return shard.total(nothing.unsqueeze(1).expand(ids.shape)), _log_total(shard, nothing - math.inf)
    return shard.total(own_score), _log_total(shard, torch.stack(parts).logsumexp(0))


def zeros_of(head: ChunkedHead, hidden: Tensor) -> Tensor:
    """Return zeros [B] that depend on hidden and on the class vectors, of which this process has none.

    Without a gradient it would not take part in the exchange of those of the others.
    """
    zeros = at_least_float32(hidden[:, :0]).sum(1)
    for table in cast("HeadWithVectors", head).class_vectors:
        zeros = zeros if table is None else zeros + table.sum()
    return zeros


def _log_total(shard: Shard, log_sum: Tensor) -> Tensor:
    return shard.stacked(log_sum).logsumexp(0)


def exact_log_prob(head: ChunkedHead, hidden: Tensor, ids: Tensor, shape: torch.Size) -> Tensor:
    """Return exact log-probabilities [*shape, K], none above 0, of hidden [B, ...] for ids [*shape, K] or [K].

    Raises:
        ValueError: an id is outside [0, C), or `ids` has another shape.
    """
    ids = _check.ids("ids", ids, head.num_classes)
    if ids.dim() == 0 or ids.shape[:-1] not in ((), shape):
        raise ValueError(f"`ids` must have shape {[*shape, 'K']} or [K], got {list(ids.shape)}")
    ids = ids.expand(*shape, ids.shape[-1])
    scores, log_z = exact_scores(head, hidden, ids.reshape(hidden.shape[0], ids.shape[-1]))
    return (scores - log_z.unsqueeze(1)).reshape(ids.shape)


@torch.no_grad()
def exact_topk(head: ChunkedHead, hidden: Tensor, k: int, exclude: Tensor | None = None) -> TopK:
    """Return the k best classes [B, k] of hidden [B, ...] that are not excluded. Probabilities are over all classes.

    Raises:
        ValueError: k is outside [1, C], or `exclude` is not [B, E] or not on the device of `hidden`.
    """
    _check.integer("k", k, 1, head.num_classes)
    if exclude is not None:
        if exclude.dim() != 2 or exclude.shape[0] != hidden.shape[0]:
            raise ValueError(f"`exclude` must have shape [{hidden.shape[0]}, E], got {list(exclude.shape)}")
        _check.device("exclude", exclude, hidden.device)
    found = [_topk(head, rows, k, others) for rows, others in _row_chunks(hidden, exclude)]
    log_prob, ids = zip(*found, strict=True)
    return TopK(torch.cat(log_prob), torch.cat(ids))


def _row_chunks(hidden: Tensor, exclude: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    if torch.compiler.is_compiling():
        return iter([(hidden, exclude)])
    rows = hidden.split(MAX_EXAMPLES)
    return zip(rows, [None] * len(rows) if exclude is None else exclude.split(MAX_EXAMPLES), strict=True)


def _topk(head: ChunkedHead, hidden: Tensor, k: int, exclude: Tensor | None) -> TopK:
    # `shape[0]`, not `len`: the length is an int, which would be a constant of a traced graph.
    best = hidden.new_empty(hidden.shape[0], 0, dtype=torch.float32)
    ids = torch.empty(hidden.shape[0], 0, dtype=torch.int64, device=hidden.device)
    parts = []
    for start, score in _chunks(head, hidden.shape[0], None):
        scores = score(hidden)
        parts.append(scores.logsumexp(1))
        if exclude is not None:
            scores = mask_columns(scores, exclude - start)
        chunk, place = scores.topk(min(k, scores.shape[1]), dim=1)
        best = torch.cat([best.to(chunk.dtype), chunk], 1)
        ids = torch.cat([ids, place + start], 1)
        best, place = best.topk(min(k, best.shape[1]), dim=1)
        ids = ids.gather(1, place)
    shard = head.shard
    if shard is None:
        return TopK(best - torch.stack(parts).logsumexp(0).unsqueeze(1), ids)
    if not parts:
        best, parts = best.to(at_least_float32(hidden).dtype), [zeros_of(head, hidden) - math.inf]
    log_z = _log_total(shard, torch.stack(parts).logsumexp(0))
    missing = (0, k - best.shape[1])
    found = shard.stacked(F.pad(best, missing, value=-math.inf)).transpose(0, 1).flatten(1)
    best, place = found.topk(k, dim=1)
    ids = shard.stacked(F.pad(ids, missing)).transpose(0, 1).flatten(1).gather(1, place)
    return TopK(best - log_z.unsqueeze(1), ids)
