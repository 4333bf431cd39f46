"""Canonical Huffman codes: a binary tree over classes that needs no pointers.

Written here because libraries build the tree node by node in Python, which takes minutes for millions of classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass import _check

# Codes are int64. A Huffman code is at most log_φ(total / least) + 1 bits long, 61 for this ratio.
MIN_WEIGHT_RATIO = 2.0**-41
MAX_LENGTH = 62


@dataclass(frozen=True)
class Code:
    """A code in which classes are numbered by length, and codes of one length are consecutive numbers.

    At depth l the leaves come first, from code first[l] on, and the inner nodes behind them. So an inner node is
    identified by its depth and its number at that depth, and only lengths need to be stored.

    Args:
        length: int64 [C], the depth of each class.
        rank: int64 [C], the place of each class in the order of (length, id).
        leaves: leaves at each depth 0 … L.
        first: the first code at each depth.
        before: the number of leaves at smaller depths.
        inner: the number of the first inner node at each depth, counting from the root down.
    """

    length: Tensor
    rank: Tensor
    leaves: tuple[int, ...]
    first: tuple[int, ...]
    before: tuple[int, ...]
    inner: tuple[int, ...]


def code_lengths(weights: Tensor) -> Tensor:
    """Return the depths of a Huffman tree over C weights, without a loop over nodes.

    The two lightest subtrees make a node no lighter than any made before. So all pairs of subtrees that are lighter
    than the lightest new node can be joined at once: the number of rounds is about that of the doublings from the
    lightest weight to the total.
    """
    n = len(weights)
    weights = weights.to("cpu", torch.float64).clamp(min=float(weights.sum()) * MIN_WEIGHT_RATIO)
    weight, order = weights.sort()
    node = order
    joins: list[Tensor] = []
    made = n
    while len(weight) > 1:
        light = int(torch.searchsorted(weight, weight[0] + weight[1], right=True))
        pairs = max(light // 2, 1)
        joins.append(node[: 2 * pairs].reshape(pairs, 2))
        joined = weight[: 2 * pairs].reshape(pairs, 2).sum(1)
        weight, order = torch.cat([joined, weight[2 * pairs :]]).sort(stable=True)
        node = torch.cat([torch.arange(made, made + pairs), node[2 * pairs :]])[order]
        made += pairs
    depth = torch.zeros(made, dtype=torch.int64)
    for pair in reversed(joins):
        made -= len(pair)
        depth[pair] = depth[made : made + len(pair)].unsqueeze(1) + 1
    return depth[:n]


def check_lengths(length: Tensor, num_classes: int) -> None:
    """Check loaded lengths, from which tables and places in them follow.

    Raises:
        ValueError: there is not one for each class, one is out of range, or they do not fill a tree.
    """
    _check.shape("_length", length, (num_classes,))
    if (bad := (length < 1) | (length > MAX_LENGTH)).any():
        raise ValueError(f"`_length` must lie in [1, {MAX_LENGTH}], {_check.at_first(length, bad)}")
    # Sums of Python's integers do not round.
    if (
        sum(number << (MAX_LENGTH - depth) for depth, number in enumerate(length.bincount().tolist()))
        != 1 << MAX_LENGTH
    ):
        raise ValueError("`_length` must be the depths of all leaves of a binary tree, got others")


def canonical(length: Tensor) -> Code:
    """Return the canonical code of given lengths, which must fill the tree (Σ 2^-length = 1)."""
    order = length.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    leaves = torch.bincount(length).tolist()
    first, before, inner = [0], [0], [0]
    for depth in range(len(leaves) - 1):
        nodes = 2**depth - first[depth] - leaves[depth]
        first.append(2 * (first[depth] + leaves[depth]))
        before.append(before[depth] + leaves[depth])
        inner.append(inner[depth] + nodes)
    return Code(length, rank, tuple(leaves), tuple(first), tuple(before), tuple(inner))
