"""The rank of a class among all classes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass import _check
from manyclass.heads import ClassHead, mask_columns

MAX_SCORES = 1 << 24  # scores held at once


@torch.no_grad()
def ranks(head: ClassHead, hidden: Tensor, target: Tensor, *, exclude: Tensor | None = None) -> Tensor:
    """Return the rank of each target, from 1, among all classes that are not excluded; ties get their mean rank.

    Args:
        head: the head that scores the classes.
        hidden: hidden vectors [..., D]; if the classes are divided among processes, those of this one.
        target: class ids [...].
        exclude: class ids [..., E] that are not ranked, padded with -1; the target is ranked even if excluded.

    Returns:
        Ranks, float64 [...]. NaN scores give the worst rank, so that a failed training does not look good.

    Example:
        >>> head = ClassHead(8, 1000)
        >>> hidden = torch.randn(4, 8)
        >>> ranks(head, hidden, head.topk(hidden, 3).ids[:, 2]).tolist()
        [3.0, 3.0, 3.0, 3.0]
    """
    target = _check.ids("target", target, head.num_classes)
    flat = hidden.reshape(-1, hidden.shape[-1])
    own = target.reshape(-1, 1)
    places = own if exclude is None else torch.cat([own, exclude.reshape(len(own), exclude.shape[-1])], 1)
    shard = head.shard
    if shard is None:
        return _from_counts(head, _counts(head, flat, places, None)).reshape(target.shape)
    # The classes are divided among processes: each compares its classes with the examples of all.
    widths = shard.vectors(torch.tensor(places.shape, device="cpu"))
    sizes = tuple(widths[:, 0].tolist())
    padded = F.pad(places, (0, int(widths[:, 1].max()) - places.shape[1]), value=-1)
    score = shard.gathered(head.scores(flat, own), sizes)
    counts = shard.summed(_counts(head, shard.gathered(flat, sizes), shard.gathered(padded, sizes), score))
    return _from_counts(head, shard.own(counts, sizes)).reshape(target.shape)


def _counts(head: ClassHead, hidden: Tensor, places: Tensor, score: Tensor | None) -> Tensor:
    """Return how many of the classes of this process score below the target, and equal to it, float64 [B, 2].

    Args:
        head: the head.
        hidden: [B, D].
        places: int64 [B, 1 + E]: the target, then excluded classes.
        score: the score of the target [B, 1]. None: it is computed.
    """
    found = [torch.empty(0, 2, dtype=torch.float64, device=hidden.device)]
    size = max(1, MAX_SCORES // min(head.num_classes, 1 << 16))
    for i, (rows, masked) in enumerate(zip(hidden.split(size), places.split(size), strict=True)):
        own = head.scores(rows, masked[:, :1]) if score is None else score[i * size :][:size]
        below, equal = torch.zeros_like(own, dtype=torch.float64), torch.zeros_like(own, dtype=torch.float64)
        for start, chunk in head.score_chunks(max(1, MAX_SCORES // max(1, len(rows)))):
            # Count the scores below, of which NaN has none. The target's masked score counts as below.
            scores = mask_columns(chunk(rows).to(own.dtype), masked - start)
            below += (scores < own).sum(1, keepdim=True)
            equal += (scores == own).sum(1, keepdim=True)
        found.append(torch.cat([below, equal], 1))
    return torch.cat(found)


def _from_counts(head: ClassHead, counts: Tensor) -> Tensor:
    below, equal = counts.unbind(1)
    return 1 + head.num_classes - below - equal / 2
