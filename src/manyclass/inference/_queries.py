"""A head's classes and hidden vectors as an index sees them, and what is asked of it."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass import _check
from manyclass.heads import ClassHead

_CHUNK = 1 << 16  # classes whose bytes are read at once
_ELEMENTS = 1 << 24  # numbers of class vectors looked up at once
_ROWS = 1 << 10


def rows_of(head: ClassHead, hidden: Tensor) -> Tensor:
    """Hidden [..., D] as [B, D], on the head's device."""
    _check.tensor("hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] != head.dim:
        raise ValueError(f"`hidden` must have shape [..., {head.dim}], got {list(hidden.shape)}")
    _check.device("hidden", hidden, head.weight.device)
    return hidden.reshape(-1, head.dim)


def rows_at_once(head: ClassHead, n: int) -> int:
    """How many examples may have n classes each looked up at once."""
    return max(1, min(_ROWS, _ELEMENTS // (n * head.dim)))


def class_vectors(head: ClassHead, ids: Tensor) -> Tensor:
    """float32 [N, D] or, with biases, [N, D + 1]: classes such that inner products with queries are scores."""
    rows = head.weight.detach()[ids].float()
    if head.similarity == "cosine":
        rows = F.normalize(rows, dim=1)
    return rows if head.bias is None else torch.cat([rows, head.bias.detach()[ids].float().unsqueeze(1)], 1)


def queries(head: ClassHead, hidden: Tensor) -> Tensor:
    """float32 [B, D] or, with biases, [B, D + 1] of hidden [B, D]."""
    hidden = hidden.detach().float()
    if head.similarity == "cosine":
        hidden = F.normalize(hidden, dim=1) * head.scale
    return hidden if head.bias is None else F.pad(hidden, (0, 1), value=1.0)


def check_exclude(head: ClassHead, hidden: Tensor, exclude: Tensor | None) -> Tensor | None:
    """Exclusions [..., E] as [B, E], checked; None where there are none."""
    if exclude is None:
        return None
    exclude = _check.ids("exclude", exclude, head.num_classes, pads=True)
    if exclude.dim() == 0 or exclude.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(f"`exclude` must have shape {[*hidden.shape[:-1], 'E']}, got {list(exclude.shape)}")
    _check.device("exclude", exclude, hidden.device)
    return exclude.reshape(-1, exclude.shape[-1]) if exclude.shape[-1] else None


def most_excluded(exclude: Tensor | None) -> int:
    """How many classes a row of [B, E] excludes at most."""
    return 0 if exclude is None or not len(exclude) else int((exclude >= 0).sum(1).max())


def keep(scores: Tensor, ids: Tensor, k: int, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """The k best [B, k] of scores and ids [B, N] that are not excluded; -inf and -1 pad."""
    if exclude is not None:
        # By search: comparing all with all would take N·E for each row.
        ascending = exclude.sort(1).values
        place = torch.searchsorted(ascending, ids.contiguous()).clamp_(max=exclude.shape[1] - 1)
        scores = scores.masked_fill(ascending.gather(1, place) == ids, -math.inf)
    missing = max(0, k - scores.shape[1])
    scores, place = F.pad(scores, (0, missing), value=-math.inf).topk(k, dim=1)
    ids = F.pad(ids, (0, missing), value=-1).gather(1, place)
    return scores, ids.masked_fill_(scores.isneginf(), -1)


def check_finite(head: ClassHead, hidden: Tensor) -> None:
    """Raise where a query, a class vector or a bias is infinite or NaN."""
    for name, parameter in (("hidden", hidden), ("weight", head.weight), ("bias", head.bias)):
        if parameter is None:
            continue
        value = parameter.detach()
        # The extremes answer for all, and no mask is made unless one is to be named.
        if not all(end.isfinite() for end in value.aminmax()):
            raise ValueError(f"`{name}` must be finite, {_check.at_first(value, ~value.isfinite())}")


def digest_of(head: ClassHead) -> str:
    """SHA-256 of the class vectors and biases, and of what makes scores of them."""
    sha = hashlib.sha256(f"{head.similarity} {head.weight.dtype} {tuple(head.weight.shape)}".encode())
    for parameter in (head.weight, head.bias):
        if parameter is not None:
            for part in parameter.detach().split(_CHUNK):
                sha.update(part.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()
