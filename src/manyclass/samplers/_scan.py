"""A scan of all classes for the largest probability that an example of a group gives to each of them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SCORES = 1 << 24  # at once


def likelihood_of_classes(query: Tensor, rows: Tensor, bias: Tensor | None, nearest: int) -> tuple[Tensor, Tensor]:
    """Return max_n log p̂_n(c), float32 [C], and the classes of the largest ŝ of each example, int64 [N, nearest].

    p̂ = exp ŝ / Σ exp ŝ with ŝ = query · rowᵀ + bias. Each example leaves its own nearest classes out of the maximum.

    Args:
        query: [N, r], the examples of one group.
        rows: [C, r], of the dtype of `query`.
        bias: [C], or None. A class of bias -inf is never among the nearest; -1 takes its place.
        nearest: the number of nearest classes.
    """
    size = max(1, MAX_SCORES // len(query))
    parts = rows.split(size)
    biases = (None,) * len(parts) if bias is None else bias.to(query.dtype).split(size)
    if len(parts) == 1:
        log_p = F.linear(query, rows, biases[0]).log_softmax(1, dtype=torch.float32)
        top, ids = log_p.topk(nearest)
        return _leave_out(log_p, ids, nearest).amax(0), ids.masked_fill(top == -math.inf, -1)
    # Two passes over parts of the classes, since all scores at once take too much memory.
    log_z: list[Tensor] = []
    best: list[tuple[Tensor, Tensor]] = []
    for number, (part, part_bias) in enumerate(zip(parts, biases, strict=True)):
        scores = F.linear(query, part, part_bias).float()
        log_z.append(scores.logsumexp(1))
        top_scores, ids = scores.topk(min(nearest, scores.shape[1]))
        best.append((top_scores, ids + number * size))
    normaliser = torch.stack(log_z).logsumexp(0).unsqueeze(1)
    top, place = torch.cat([scores for scores, _ in best], 1).topk(nearest)
    ids = torch.cat([ids for _, ids in best], 1).gather(1, place)
    found = []
    for number, (part, part_bias) in enumerate(zip(parts, biases, strict=True)):
        log_p = F.linear(query, part, part_bias).float().sub_(normaliser)
        if nearest:
            # A last column takes the nearest that are in other parts.
            inside = ids - number * size
            inside = torch.where((inside >= 0) & (inside < len(part)), inside, len(part))
            log_p = _leave_out(F.pad(log_p, (0, 1)), inside, nearest)[:, :-1]
        found.append(log_p.amax(0))
    return torch.cat(found), ids.masked_fill(top == -math.inf, -1)


def _leave_out(log_p: Tensor, ids: Tensor, nearest: int) -> Tensor:
    return log_p.scatter_(1, ids, -math.inf) if nearest else log_p
