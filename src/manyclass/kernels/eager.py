"""Eager reference: scores of a block of candidates, in any grouping, by one batched product."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass.candidates import Block, Candidates
from manyclass.forms import Form, Similarity
from manyclass.kernels.draw import LinearDraw


def eager_loss(form: Form, draw: LinearDraw) -> Tensor:
    """Return the losses [B] of a form by torch's operators, differentiable any number of times."""
    blocks, similarity = draw.candidates.parts(empty=draw.target), draw.similarity
    ids = torch.cat([draw.target, *(block.ids.reshape(-1) for block in blocks)])
    sizes = [len(draw.target), *(block.ids.numel() for block in blocks)]
    rows = directions(F.embedding(ids, draw.weight, sparse=draw.sparse), similarity, scaled=False)
    target_rows, *block_rows = rows.split(sizes)
    target_bias, *block_biases = [None] * len(sizes)
    if draw.bias is not None:
        target_bias, *block_biases = torch.gather(draw.bias, 0, ids, sparse_grad=draw.sparse).split(sizes)
    hidden = directions(draw.hidden, similarity)
    target_score = (hidden * target_rows).sum(-1)
    if target_bias is not None:
        target_score = target_score + target_bias
    scores = [linear_scores(hidden, *part) for part in zip(block_rows, block_biases, blocks, strict=True)]
    return form.loss(target_score, exclude_hits(scores, draw.candidates), draw.candidates)


def directions(x: Tensor, similarity: Similarity, *, scaled: bool = True) -> Tensor:
    """Return vectors as the similarity takes them: unchanged, or of unit length times the scale."""
    if similarity.name == "dot":
        return x
    # A norm in half precision would overflow, or be too coarse.
    unit = F.normalize(at_least_float32(x), dim=-1).to(x.dtype)
    return unit * similarity.scale if scaled else unit


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged if it is float64: scores may be half precision, but not their sums."""
    return x if x.dtype == torch.float64 else x.float()


def linear_scores(hidden: Tensor, rows: Tensor, bias: Tensor | None, block: Block) -> Tensor:
    """Return inner products [B, K] of hidden [B, D] with the rows [G·K, D] of a block's classes, plus bias [G·K]."""
    groups, k = block.ids.shape
    scores = torch.bmm(block.group(hidden), rows.reshape(groups, k, rows.shape[1]).transpose(1, 2))
    if bias is not None:
        # The bias is added after the product, which autocast computes in half precision: the bias need not be.
        scores = scores + bias.reshape(groups, 1, k)
    return block.ungroup(scores, len(hidden))


def exclude_hits(scores: list[Tensor], candidates: Candidates) -> Tensor:
    """Concatenate scores [B, K] of the parts, in float32 or better, with -inf where an example excludes the class."""
    # Half precision would overflow when log κ is added, and its log-sum-exp is too coarse for a loss.
    columns = [at_least_float32(score) for score in scores]
    if candidates.excluded.shape[1]:
        # Included classes are excluded from the blocks alone.
        for i, block in enumerate(candidates.blocks):
            columns[i] = columns[i].masked_fill(candidates.block_hits(block), -math.inf)
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def mask_columns(scores: Tensor, columns: Tensor) -> Tensor:
    """Return scores [B, n] with -inf in the columns [B, E] that lie in [0, n)."""
    n = scores.shape[1]
    # Columns outside [0, n) mark an extra last column, which is cut off.
    columns = torch.where((columns >= 0) & (columns < n), columns, n)
    hit = torch.zeros(scores.shape[0], n + 1, dtype=torch.bool, device=scores.device).scatter_(1, columns, True)
    return scores.masked_fill(hit[:, :n], -math.inf)


def eager_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, exclude: Tensor | None
) -> Tensor:
    """Return the losses [B] over all classes by torch's operators, differentiable any number of times.

    Args:
        hidden: [B, D].
        weight: the table [C, D].
        bias: [C], or None.
        target: int64 [B].
        exclude: int64 [B, E], padded with -1, or None.
    """
    scores = at_least_float32(F.linear(hidden, weight))
    if bias is not None:
        # The bias is added after the product, which autocast computes in half precision: the bias need not be.
        scores = scores + bias
    if exclude is not None and exclude.shape[1]:
        scores = mask_columns(scores, exclude)
    return F.cross_entropy(scores, target, reduction="none")
