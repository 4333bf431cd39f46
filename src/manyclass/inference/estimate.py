"""log Z from a few draws, with an error bar."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.eval_mode import eval_mode
from manyclass.heads import ClassHead
from manyclass.heads._batch import wide
from manyclass.inference._queries import rows_at_once, rows_of
from manyclass.samplers import Sampler

_ROWS = 256  # examples at once: where each has a draw of its own, so many times k class vectors are held
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class LogZ:
    """Estimates of log Z, and how far off they may be.

    Args:
        log_z: [...].
        error: [...], half the width of an interval around it that holds the exact log Z in 95 cases of 100.
    """

    log_z: Tensor
    error: Tensor


@torch.no_grad()
def estimate_log_z(
    head: ClassHead,
    hidden: Tensor,
    *,
    explicit: Tensor | None = None,
    sampler: Sampler | None = None,
    draws: int = 8,
    generator: torch.Generator | None = None,
) -> LogZ:
    """log Z̃ from independent draws of a sampler, and its error.

    Each draw gives Z̃ = Σ u over the explicit classes + Σ κ u over the drawn ones that are not explicit, which is Z on
    average. log_z is the log of the mean over draws; its error follows from the spread of the draws, s/(Z̃ √draws) for
    log Z̃ to first order, times Student's t for so many draws.

    A class that carries much of Z and is rarely drawn makes most draws fall short, all by the same: then the spread of
    a few draws says nothing, and the interval misses log Z more often than it should, mostly from below. Explicit
    classes cure that. On a word model (33,278 classes, k = 512) the interval holds log Z in 91 cases of 100 without
    any, in 93 with the best 10 explicit, in 94 to 95 with the best 128, and in 93 with what an index finds of those as
    `top` asks it. More draws make it narrower, not truer. `Clustered` draws most where the explicit classes are: beside
    those its interval holds log Z a little less often than that of other designs.

    Args:
        head: whose Z.
        hidden: [..., D].
        explicit: ids [..., E], -1 pads: classes that are summed as they are, such as the best an index has found.
        sampler: draws the others. Default: the head's own. One that needs more classes for this than for training is
            given here; one that looks at class vectors must have been shown the head's (`sampler.follow`).
        draws: how many, at least 4. All rows of 256 share a draw, unless the sampler draws for groups.
        generator: for the draws.

    Raises:
        ValueError: fewer draws; a sampler for other classes or one whose Z̃ is not Z on average.

    Example:
        >>> from manyclass.samplers import Systematic
        >>> generator = torch.Generator().manual_seed(0)
        >>> head = ClassHead(8, 5000, sampler=Systematic(torch.ones(5000), k=500))
        >>> hidden = torch.randn(2, 8, generator=generator)
        >>> estimate = estimate_log_z(head, hidden, explicit=head.topk(hidden, 5).ids, generator=generator)
        >>> (estimate.log_z - head.log_z(hidden)).abs() < 3 * estimate.error
        tensor([True, True])
    """
    _check.whole("draws", draws, 4)
    sampler = head.sampler if sampler is None else sampler
    if sampler.num_classes != head.num_classes:
        raise ValueError(f"`sampler` must draw from {head.num_classes} classes, got {sampler.num_classes}")
    if not sampler.unbiased:
        raise ValueError(f"`sampler` must have Z̃ = Z on average, got {type(sampler).__name__}, which has not")
    rows = rows_of(head, hidden)
    if sampler.device is not None:
        _check.device("sampler", rows, sampler.device)
    if explicit is None:
        known = torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device)
    else:
        explicit = _check.ids("explicit", explicit, head.num_classes, pads=True)
        if explicit.dim() == 0 or explicit.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(f"`explicit` must have shape {[*hidden.shape[:-1], 'E']}, got {list(explicit.shape)}")
        _check.device("explicit", explicit, hidden.device)
        known = _once(explicit.reshape(len(rows), explicit.shape[-1]))
    size = min(_ROWS, rows_at_once(head, max(1, known.shape[1])))
    parts = []
    with eval_mode(*([sampler] if isinstance(sampler, nn.Module) else [])):
        for part, others in zip(rows.split(size), known.split(size), strict=True):
            parts.append(_estimate(head, part, others, sampler, draws, generator))
    log_z, error = (torch.cat(x).reshape(hidden.shape[:-1]) for x in zip(*parts, strict=True))
    return LogZ(log_z, error)


def _estimate(
    head: ClassHead,
    hidden: Tensor,
    explicit: Tensor,
    sampler: Sampler,
    draws: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """log Z̃ and its error [B] of hidden [B, D]."""
    if not len(hidden):
        return wide(hidden.new_empty(0)), wide(hidden.new_empty(0))
    own = head.scores(hidden, explicit.clamp(min=0)).masked_fill_(explicit < 0, -math.inf)
    summed = own.double().logsumexp(1)
    # Nobody is the target here: any class stands for it, and its score is not used.
    target = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    logs = []
    for _ in range(draws):
        candidates = sampler.draw(target, explicit, hidden=hidden, generator=generator)
        _, scores = head.candidate_scores(hidden, target, candidates)
        rest = (scores + candidates.log_kappa(scores.dtype)).double().logsumexp(1)
        logs.append(torch.logaddexp(summed, rest))
    log_z = torch.stack(logs)
    # In units of the largest, so that nothing overflows.
    most = log_z.amax(0)
    z = (log_z - most).exp()
    mean = z.mean(0)
    error = _student(draws - 1) * z.std(0) / (mean * math.sqrt(draws))
    return (most + mean.log()).to(own.dtype), error.to(own.dtype)


def _student(degrees: int) -> float:
    """What half of Student's distribution's middle 95 % reaches to."""
    # Not scipy.stats, which takes a second to import.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + _CONFIDENCE) / 2))


def _once(ids: Tensor) -> Tensor:
    """The same ids [B, E], a class that a row repeats only once, -1 pads."""
    ids = ids.sort(1).values
    ids[:, 1:] = ids[:, 1:].masked_fill(ids[:, 1:] == ids[:, :-1], -1)
    return ids
