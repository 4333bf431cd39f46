"""The best classes and their probabilities, exact or approximated with an index and a few draws."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass import _check
from manyclass._context import isolated
from manyclass.heads import ClassHead
from manyclass.inference._queries import (
    check_exclude,
    check_head,
    flatten_hidden,
    max_excluded,
    rows_per_chunk,
    select_best,
)
from manyclass.inference.estimate import estimate_log_z
from manyclass.inference.index import Index
from manyclass.samplers import Sampler

PROBABILITIES = ("exact", "estimated", "none")
EXPLICIT_CLASSES = 128  # best classes of the index, explicit in log Z̃
# A rare class with high probability that the index misses makes the error bar too narrow, since it appears in one draw
# of hundreds. So an estimate searches more lists than the best classes alone need, which costs less than the draws.
ESTIMATE_PROBE_FACTOR = 8


@dataclass(frozen=True)
class Top:
    """Best classes of each example, best first.

    Args:
        ids: class ids, int64 [..., k]; -1 pads if fewer than k classes are left.
        log_prob: log probabilities [..., k], normalised over all classes including excluded ones; -inf for a pad. None
            with `probabilities="none"`.
        error: half-width [...] of a 95 % confidence interval around each log_prob; an example's log_probs share it,
            because they share log Z. None if they are exact.
    """

    ids: Tensor
    log_prob: Tensor | None
    error: Tensor | None


@torch.no_grad()
def top(
    head: ClassHead,
    hidden: Tensor,
    k: int,
    *,
    index: Index | None = None,
    exclude: Tensor | None = None,
    probabilities: str = "exact",
    draws: int = 8,
    sampler: Sampler | None = None,
    generator: torch.Generator | None = None,
) -> Top:
    """Return the k best classes of each example; chunks of examples and of classes bound the memory.

    Args:
        head: the head that scores the classes.
        hidden: hidden vectors [..., D].
        k: number of classes.
        index: index to search; None means an exact search over all classes.
        exclude: class ids [..., E] to leave out, padded with -1.
        probabilities: "exact" computes log Z over all classes; "estimated" estimates it from draws, with the best 128
            classes of the index explicit, and gives an error; "none" returns only class ids.
        draws: number of draws of the estimate, see `estimate_log_z`.
        sampler: sampler of the estimate, see `estimate_log_z`.
        generator: generator of the estimate, see `estimate_log_z`.

    Raises:
        TypeError: the head has no class vectors.
        ValueError: `index` belongs to another head, or `probabilities` is "estimated" without an index.

    Example:
        >>> head = ClassHead(8, 1000)
        >>> found = top(head, torch.randn(3, 8), 5)
        >>> found.ids.shape, found.log_prob.shape, found.error
        (torch.Size([3, 5]), torch.Size([3, 5]), None)
    """
    _check.choice("probabilities", probabilities, PROBABILITIES)
    check_head(head)
    _check.integer("k", k, 1, head.num_classes)
    rows, others = flatten_hidden(head, hidden), check_exclude(head, hidden, exclude)
    if index is None:
        if probabilities == "estimated":
            raise ValueError(
                "`probabilities` must be 'exact' or 'none' without an `index`, got 'estimated': a search over all "
                "classes already gives the exact log Z"
            )
        best = head.topk(rows, k, exclude=others)
        shape = (*hidden.shape[:-1], k)
        ids = best.ids.masked_fill(best.log_prob.isneginf(), -1).reshape(shape)
        return Top(ids, None if probabilities == "none" else best.log_prob.reshape(shape), None)
    if index.head is not head:
        raise ValueError("`index` must be of this `head`, got one of another")
    estimated = probabilities == "estimated"
    n = max(k, EXPLICIT_CLASSES if estimated else 0) + max_excluded(others)
    size = rows_per_chunk(head, n)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(rows), 1), size):
        here = slice(start, start + size)
        # Excluded classes are part of Z, and often have high scores, so they are removed only after the search.
        scores, found = index.nearest(rows[here], n, probe_factor=ESTIMATE_PROBE_FACTOR if estimated else 1)
        best_scores, ids = select_best(scores, found, k, None if others is None else others[here])
        if probabilities == "none":
            parts.append((ids,))
        elif probabilities == "exact":
            # Not from the scores of the index, which are rounded otherwise than log Z, and may lie above it. Neither
            # follows autocast.
            with isolated():
                log_prob = head.log_prob(rows[here], ids.clamp(min=0)).masked_fill(ids < 0, -math.inf)
            log_prob, order = log_prob.sort(dim=1, descending=True, stable=True)
            parts.append((ids.gather(1, order), log_prob))
        else:
            estimate = estimate_log_z(
                head, rows[here], explicit=found, sampler=sampler, draws=draws, generator=generator
            )
            parts.append((ids, best_scores - estimate.log_z.unsqueeze(1), estimate.error))
    whole = [torch.cat(x).reshape(*hidden.shape[:-1], *x[0].shape[1:]) for x in zip(*parts, strict=True)]
    return Top(whole[0], whole[1] if len(whole) > 1 else None, whole[2] if len(whole) > 2 else None)
