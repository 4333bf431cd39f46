"""Estimates of log Z from a few draws, with an error bar."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass import _check
from manyclass._context import isolated
from manyclass.heads import ClassHead
from manyclass.inference._queries import check_head, flatten_hidden, rows_per_chunk
from manyclass.kernels import at_least_float32
from manyclass.samplers import Sampler

MAX_ROWS = 256  # examples at once: with a separate draw each, this many times k class vectors are in memory
CONFIDENCE = 0.95


@dataclass(frozen=True)
class LogZ:
    """Estimates of log Z with their error.

    Args:
        log_z: estimates [...].
        error: half-width [...] of a 95 % confidence interval for the exact log Z.
    """

    log_z: Tensor
    error: Tensor


def estimate_log_z(
    head: ClassHead,
    hidden: Tensor,
    *,
    explicit: Tensor | None = None,
    sampler: Sampler | None = None,
    draws: int = 8,
    generator: torch.Generator | None = None,
) -> LogZ:
    """Estimate log Z from independent draws of a sampler, with an error.

    Each draw gives Z̃ = Σ u over the explicit classes + Σ κ u over the drawn ones that are not explicit, an unbiased
    estimate of Z. log_z is the log of the mean over draws; its error is the standard error s/(Z̃ √draws) of log Z̃ to
    first order, times the quantile of Student's t.

    If a class with a large part of Z is rarely drawn, most draws are too low by the same amount: the spread of a few
    draws is then too small, and the interval misses log Z more often than it should, mostly from below. Explicit
    classes solve that. On a word model (33,278 classes, k = 512) the interval covers log Z in 91 % of cases without
    any, 93 % with the best 10 explicit, 94 to 95 % with the best 128, and 93 % with those that an index finds in `top`.
    More draws make the interval narrower, but not more reliable. `Clustered` draws mostly near the explicit classes, so
    its interval covers log Z slightly less often than that of other designs.

    Args:
        head: the head that scores the classes.
        hidden: hidden vectors [..., D].
        explicit: class ids [..., E], padded with -1, that are summed exactly, such as the best of an index.
        sampler: sampler of the other classes, by default the head's. Pass another to draw more classes than in
            training; a sampler that depends on class vectors must have the head's attached (`sampler.attach`).
        draws: number of draws, at least 4. Chunks of 256 rows share a draw, unless the sampler draws per group.
        generator: random generator of the draws.

    Raises:
        TypeError: the head has no class vectors.
        ValueError: `draws` is below 4, or the sampler has another number of classes or a biased Z̃.

    Example:
        >>> from manyclass.samplers import Systematic
        >>> generator = torch.Generator().manual_seed(0)
        >>> head = ClassHead(8, 5000, sampler=Systematic(torch.ones(5000), k=500))
        >>> hidden = torch.randn(2, 8, generator=generator)
        >>> estimate = estimate_log_z(head, hidden, explicit=head.topk(hidden, 5).ids, generator=generator)
        >>> (estimate.log_z - head.log_z(hidden)).abs() < 3 * estimate.error
        tensor([True, True])
    """
    _check.integer("draws", draws, 4)
    check_head(head)
    sampler = head.sampler if sampler is None else sampler
    if sampler.num_classes != head.num_classes:
        raise ValueError(f"`sampler` must draw from {head.num_classes} classes, got {sampler.num_classes}")
    if not sampler.unbiased:
        raise ValueError(f"`sampler` must have Z̃ = Z on average, got {type(sampler).__name__}, which has not")
    rows = flatten_hidden(head, hidden)
    if sampler.device is not None:
        _check.device("sampler", rows, sampler.device)
    if explicit is None:
        known = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    else:
        explicit = _check.ids("explicit", explicit, head.num_classes, pads=True)
        if explicit.dim() == 0 or explicit.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(f"`explicit` must have shape {[*hidden.shape[:-1], 'E']}, got {list(explicit.shape)}")
        _check.device("explicit", explicit, hidden.device)
        known = _deduplicate(explicit.reshape(len(rows), explicit.shape[-1]))
    size = min(MAX_ROWS, rows_per_chunk(head, max(1, known.shape[1])))
    parts = []
    for part, others in zip(rows.split(size), known.split(size), strict=True):
        with isolated():
            parts.append(_estimate(head, part, others, sampler, draws, generator))
    log_z, error = (torch.cat(x).reshape(hidden.shape[:-1]) for x in zip(*parts, strict=True))
    return LogZ(log_z, error)


def _estimate(
    head: ClassHead, hidden: Tensor, explicit: Tensor, sampler: Sampler, draws: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return log Z̃ and its error [B] for hidden [B, D]."""
    if not len(hidden):
        return at_least_float32(hidden.new_empty(0)), at_least_float32(hidden.new_empty(0))
    own = head.scores(hidden, explicit.clamp(min=0)).masked_fill_(explicit < 0, -math.inf)
    summed = own.double().logsumexp(1)
    # There is no target here; a draw needs one, but its score is not used.
    target = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    logs = []
    for _ in range(draws):
        candidates = sampler.draw(target, explicit, hidden=hidden, generator=generator)
        _, scores = head.candidate_scores(hidden, target, candidates)
        rest = (scores + candidates.log_kappa(scores.dtype)).double().logsumexp(1)
        logs.append(torch.logaddexp(summed, rest))
    log_z = torch.stack(logs)
    # Divide by the largest, so that nothing overflows.
    most = log_z.amax(0)
    z = (log_z - most).exp()
    mean = z.mean(0)
    error = _student_quantile(draws - 1) * z.std(0) / (mean * math.sqrt(draws))
    return (most + mean.log()).to(own.dtype), error.to(own.dtype)


def _student_quantile(degrees: int) -> float:
    """Return the half-width of the central 95 % interval of Student's t distribution."""
    # scipy.stats takes a second to import; scipy.special does not.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def _deduplicate(ids: Tensor) -> Tensor:
    """Replace repeated ids within a row of [B, E] by -1."""
    ids = ids.sort(1).values
    ids[:, 1:] = ids[:, 1:].masked_fill(ids[:, 1:] == ids[:, :-1], -1)
    return ids
