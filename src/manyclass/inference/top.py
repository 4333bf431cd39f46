"""The best classes and their probabilities: exactly, or by an index and a few draws."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass import _check
from manyclass.heads import ClassHead
from manyclass.inference._queries import check_exclude, keep, most_excluded, rows_at_once, rows_of
from manyclass.inference.estimate import estimate_log_z
from manyclass.inference.index import Index
from manyclass.samplers import Sampler

PROBABILITIES = ("exact", "estimated", "none")
_EXPLICIT = 128  # the best classes, which log Z̃ sums as they are
# A rare class that is likely here and was not found spoils the error bar: of its own draws one in hundreds shows it. So
# more lists are searched for it than for the best classes alone, which costs less than the draws do.
_THOROUGH = 8


@dataclass(frozen=True)
class Top:
    """The best classes of each example, best first.

    Args:
        ids: int64 [..., k]; -1 where fewer than k were left.
        log_prob: [..., k], over all classes, excluded ones as well; -inf where there is no class. None where none was
            asked for.
        error: [...], half the width of an interval around each log_prob that holds the exact one in 95 cases of 100:
            they share their log Z, and have it from there. None where they are exact.
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
    """The k best classes of each example, in chunks of examples and of classes, so that any number fits.

    Args:
        head: whose classes.
        hidden: [..., D].
        k: how many.
        index: where to look for them; None: among all classes, exactly.
        exclude: ids [..., E], -1 pads: classes that must not be among them.
        probabilities: "exact": log Z over all classes; "estimated": from draws, with an error, the best 128 classes
            that the index finds summed as they are; "none": only which classes.
        draws, sampler, generator: of the estimate, see `estimate_log_z`.

    Raises:
        ValueError: an index of another head; probabilities estimated without an index, where they would be no cheaper
            than exact ones.

    Example:
        >>> head = ClassHead(8, 1000)
        >>> found = top(head, torch.randn(3, 8), 5)
        >>> found.ids.shape, found.log_prob.shape, found.error
        (torch.Size([3, 5]), torch.Size([3, 5]), None)
    """
    _check.choice("probabilities", probabilities, PROBABILITIES)
    _check.whole("k", k, 1, head.num_classes)
    rows, others = rows_of(head, hidden), check_exclude(head, hidden, exclude)
    if index is None:
        if probabilities == "estimated":
            raise ValueError(
                "`probabilities` must be 'exact' or 'none' without an `index`, got 'estimated': who looks at all "
                "classes has summed them"
            )
        best = head.topk(rows, k, exclude=others)
        shape = (*hidden.shape[:-1], k)
        ids = best.ids.masked_fill(best.log_prob.isneginf(), -1).reshape(shape)
        return Top(ids, None if probabilities == "none" else best.log_prob.reshape(shape), None)
    if index.head is not head:
        raise ValueError("`index` must be of this `head`, got one of another")
    estimated = probabilities == "estimated"
    n = max(k, _EXPLICIT if estimated else 0) + most_excluded(others)
    size = rows_at_once(head, n)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(rows), 1), size):
        here = slice(start, start + size)
        # What is excluded is in Z all the same, and often among the heaviest: so it is left out only afterwards.
        scores, found = index.nearest(rows[here], n, thorough=_THOROUGH if estimated else 1)
        best_scores, ids = keep(scores, found, k, None if others is None else others[here])
        if probabilities == "none":
            parts.append((ids,))
        elif probabilities == "exact":
            parts.append((ids, best_scores - head.log_z(rows[here]).unsqueeze(1)))
        else:
            estimate = estimate_log_z(
                head, rows[here], explicit=found, sampler=sampler, draws=draws, generator=generator
            )
            parts.append((ids, best_scores - estimate.log_z.unsqueeze(1), estimate.error))
    whole = [torch.cat(x).reshape(*hidden.shape[:-1], *x[0].shape[1:]) for x in zip(*parts, strict=True)]
    return Top(whole[0], whole[1] if len(whole) > 1 else None, whole[2] if len(whole) > 2 else None)
