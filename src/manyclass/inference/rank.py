"""Where a class stands among all others."""

import torch
from torch import Tensor

from manyclass import _check
from manyclass.heads import ClassHead, mask_columns

_ELEMENTS = 1 << 24  # scores held at once


@torch.no_grad()
def ranks(head: ClassHead, hidden: Tensor, target: Tensor, *, exclude: Tensor | None = None) -> Tensor:
    """The rank of each target among all classes that are not excluded, from 1; that of ties is their mean.

    Args:
        head: who scores.
        hidden: [..., D].
        target: ids [...].
        exclude: ids [..., E], -1 pads: classes that are not ranked; the target is, wherever it stands.

    Returns:
        float64 [...]. Where scores are NaN, the worst rank: a training that failed must not look good.

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
    found = []
    size = max(1, _ELEMENTS // min(head.num_classes, 1 << 16))
    for rows, wanted, masked in zip(flat.split(size), own.split(size), places.split(size), strict=True):
        score = head.scores(rows, wanted)
        below, equal = torch.zeros_like(score, dtype=torch.float64), torch.zeros_like(score, dtype=torch.float64)
        for start, chunk in head.score_chunks(max(1, _ELEMENTS // max(1, len(rows)))):
            # By those below, of which there are none where scores are NaN. The target is below itself.
            scores = mask_columns(chunk(rows).to(score.dtype), masked - start)
            below += (scores < score).sum(1, keepdim=True)
            equal += (scores == score).sum(1, keepdim=True)
        found.append((1 + head.num_classes - below - equal / 2).squeeze(1))
    return torch.cat(found).reshape(target.shape)
