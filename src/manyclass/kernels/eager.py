"""The eager reference: scores of a block of candidates, in any grouping, by one batched product."""

import math

import torch
from torch import Tensor

from manyclass.candidates import Block, Candidates


def linear_scores(hidden: Tensor, rows: Tensor, bias: Tensor | None, block: Block) -> Tensor:
    """Inner products of hidden [B, D] with the rows [G·K, D] of a block's classes, plus bias [G·K]: [B, K]."""
    groups, k = block.ids.shape
    scores = torch.bmm(block.group(hidden), rows.reshape(groups, k, rows.shape[1]).transpose(1, 2))
    if bias is not None:
        # After the product: under autocast it is half precision, and the bias need not be.
        scores = scores + bias.reshape(groups, 1, k)
    return block.ungroup(scores, len(hidden))


def exclude_hits(scores: list[Tensor], candidates: Candidates) -> Tensor:
    """The blocks' scores [B, K] side by side, in float32 or better, -inf where an example excludes the class."""
    columns = []
    for score, block in zip(scores, candidates.blocks, strict=True):
        # Half precision would overflow where log κ is added, and its log-sum-exp is too coarse for a loss.
        score = score if score.dtype == torch.float64 else score.float()
        if candidates.excluded.shape[1]:
            score = score.masked_fill(candidates.hits(block.spread(block.ids, candidates.batch)), -math.inf)
        columns.append(score)
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)
