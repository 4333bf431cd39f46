"""Class vectors and queries of an index, and checks of its arguments."""

import hashlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass import _check
from manyclass.heads import ClassHead

CHUNK_CLASSES = 1 << 16  # hashed at once
MAX_GATHERED_NUMBERS = 1 << 24  # of class vectors gathered at once
MAX_ROWS = 1 << 10  # examples at once


def check_head(head: object) -> None:
    """Raise a TypeError unless the head has a table of class vectors, whose inner products with queries are scores."""
    # Not by class: a compiled head has these attributes too.
    if not all(hasattr(head, name) for name in ("weight", "bias", "dim", "similarity")):
        raise TypeError(
            f"`head` must be a ClassHead, which has class vectors, got a {type(head).__name__}: "
            "use the `topk` of other heads"
        )


def flatten_hidden(head: ClassHead, hidden: Tensor) -> Tensor:
    """Check hidden [..., D], and return it as [B, D], in the dtype of the head if autocast is on."""
    check_head(head)
    _check.tensor("hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] != head.dim:
        raise ValueError(f"`hidden` must have shape [..., {head.dim}], got {list(hidden.shape)}")
    _check.device("hidden", hidden, head.weight.device)
    # Autocast accepts vectors of any dtype. An index and its estimates are computed without autocast.
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(head.weight.dtype)
    return hidden.reshape(-1, head.dim)


def rows_per_chunk(head: ClassHead, n: int) -> int:
    """Return the number of examples for which n class vectors each fit into memory."""
    return max(1, min(MAX_ROWS, MAX_GATHERED_NUMBERS // (n * head.dim)))


def class_vectors(head: ClassHead) -> Callable[[Tensor], Tensor]:
    """Return a function from ids [N] to float32 vectors [N, D], with biases [N, D + 1].

    The inner products of these vectors with queries are scores.
    """
    weight, bias = head.whole_tables()

    def vectors(ids: Tensor) -> Tensor:
        rows = weight.detach()[ids].float()
        if head.similarity == "cosine":
            rows = F.normalize(rows, dim=1)
        return rows if bias is None else torch.cat([rows, bias.detach()[ids].float().unsqueeze(1)], 1)

    return vectors


def query_vectors(head: ClassHead, hidden: Tensor) -> Tensor:
    """Return float32 queries [B, D], with biases [B, D + 1], for hidden [B, D]."""
    hidden = hidden.detach().float()
    if head.similarity == "cosine":
        hidden = F.normalize(hidden, dim=1) * head.scale
    return hidden if head.bias is None else F.pad(hidden, (0, 1), value=1.0)


def check_exclude(head: ClassHead, hidden: Tensor, exclude: Tensor | None) -> Tensor | None:
    """Check exclusions [..., E], and return them as [B, E], or None if there are none."""
    if exclude is None:
        return None
    exclude = _check.ids("exclude", exclude, head.num_classes, pads=True)
    if exclude.dim() == 0 or exclude.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(f"`exclude` must have shape {[*hidden.shape[:-1], 'E']}, got {list(exclude.shape)}")
    _check.device("exclude", exclude, hidden.device)
    return exclude.reshape(-1, exclude.shape[-1]) if exclude.shape[-1] else None


def max_excluded(exclude: Tensor | None) -> int:
    """Return the largest number of classes that a row of [B, E] excludes."""
    return 0 if exclude is None or not len(exclude) else int((exclude >= 0).sum(1).max())


def select_best(scores: Tensor, ids: Tensor, k: int, exclude: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the k best scores and ids [B, k] of [B, N] that are not excluded, padded with -inf and -1."""
    if exclude is not None:
        # Binary search, because comparing all pairs takes N·E per row.
        ascending = exclude.sort(1).values
        place = torch.searchsorted(ascending, ids.contiguous()).clamp_(max=exclude.shape[1] - 1)
        scores = scores.masked_fill(ascending.gather(1, place) == ids, -math.inf)
    missing = max(0, k - scores.shape[1])
    scores, place = F.pad(scores, (0, missing), value=-math.inf).topk(k, dim=1)
    ids = F.pad(ids, (0, missing), value=-1).gather(1, place)
    return scores, ids.masked_fill_(scores.isneginf(), -1)


def check_finite(head: ClassHead, hidden: Tensor) -> None:
    """Raise a ValueError if a query, a class vector or a bias is infinite or NaN."""
    for name, parameter in zip(("hidden", "weight", "bias"), (hidden, *head.whole_tables()), strict=True):
        if parameter is None:
            continue
        value = parameter.detach()
        # Checking the extremes suffices, and avoids a mask in the normal case.
        if not all(end.isfinite() for end in value.aminmax()):
            raise ValueError(f"`{name}` must be finite, {_check.at_first(value, ~value.isfinite())}")


def weights_digest(head: ClassHead) -> str:
    """Return the SHA-256 of similarity, dtype, shape, class vectors and biases."""
    sha = hashlib.sha256(f"{head.similarity} {head.weight.dtype} {tuple(head.weight.shape)}".encode())
    for parameter in head.whole_tables():
        if parameter is not None:
            for part in parameter.detach().split(CHUNK_CLASSES):
                sha.update(part.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()
