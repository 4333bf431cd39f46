"""A scan of all classes for the largest probability that an example of a group gives to each of them.

Two passes over the products of examples and classes, neither of which stores them: the first sums up the normaliser of
each example, the second takes the maximum over the examples of a group.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.kernels.triton.sizes import cdiv

EXAMPLES = 64  # of a tile of products
CLASSES = 128
RANK = 64  # directions of a sketch at a time
PROGRAMS = 1024  # of the first pass, about: parts of the classes for each tile of examples
WARPS = 4


def largest_log_p(query: Tensor, rows: Tensor, bias: Tensor | None, group_size: int) -> Tensor:
    """Return max_n log p̂_n(c), float32 [G, C], over the examples n of each group.

    p̂ = exp ŝ / Σ exp ŝ with ŝ = query · rowᵀ + bias. An example whose normaliser is not finite has no part in it.

    Args:
        query: [N, r]; each run of `group_size` examples is a group, and what is left is the last one.
        rows: [C, r], of the dtype of `query`.
        bias: float32 [C], or None.
        group_size: the number of examples of a group.
    """
    query, rows = query.contiguous(), rows.contiguous()
    (examples, rank), classes = query.shape, len(rows)
    tiles = cdiv(examples, EXAMPLES)
    parts = max(1, min(cdiv(classes, CLASSES), PROGRAMS // tiles))
    part = cdiv(cdiv(classes, parts), CLASSES) * CLASSES
    sums = torch.empty(parts, examples, dtype=torch.float32, device=rows.device)
    groups = cdiv(examples, group_size)
    largest = torch.empty(groups, classes, dtype=torch.float32, device=rows.device)
    sizes = {"EXAMPLES": EXAMPLES, "CLASSES": CLASSES, "RANK": RANK, "num_warps": WARPS}
    operands = (query, rows, bias, examples, classes, rank)
    with torch.cuda.device_of(rows):
        _log_sums[(tiles, parts)](*operands, sums, part, HAS_BIAS=bias is not None, **sizes)
        log_z = sums.logsumexp(0)
        # One axis: the second may have 65,535 programs at most.
        grid = (cdiv(classes, CLASSES) * groups,)
        _largest[grid](*operands, log_z, largest, group_size, HAS_BIAS=bias is not None, **sizes)
    return largest


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    query,
    rows,
    example,
    column,
    examples,
    classes,
    rank,
    EXAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    RANK: tl.constexpr,
) -> Any:
    """Return a tile [EXAMPLES, CLASSES] of inner products, in float32."""
    scores = tl.zeros([EXAMPLES, CLASSES], tl.float32)
    for first in range(0, rank, RANK):
        direction = first + tl.arange(0, RANK)
        inside = direction < rank
        left = tl.load(
            query + example.to(tl.int64)[:, None] * rank + direction[None, :],
            mask=(example < examples)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            rows + column.to(tl.int64)[None, :] * rank + direction[:, None],
            mask=(column < classes)[None, :] & inside[:, None],
            other=0.0,
        )
        scores = tl.dot(left, right, scores, input_precision="ieee")
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _log_sums(  # type: ignore[no-untyped-def]
    query,
    rows,
    bias,
    examples,
    classes,
    rank,
    sums,
    part,
    HAS_BIAS: tl.constexpr,
    EXAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    RANK: tl.constexpr,
) -> Any:
    """Write log Σ exp ŝ over one part of the classes, for one tile of examples."""
    example = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    start = tl.program_id(1) * part
    largest = tl.full([EXAMPLES], float("-inf"), tl.float32)
    total = tl.zeros([EXAMPLES], tl.float32)
    for first in range(start, min(start + part, classes), CLASSES):
        column = first + tl.arange(0, CLASSES)
        scores = _products(query, rows, example, column, examples, classes, rank, EXAMPLES, CLASSES, RANK)
        if HAS_BIAS:
            scores += tl.load(bias + column, mask=column < classes, other=0.0)[None, :]
        scores = tl.where((column < classes)[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(scores - base[:, None]), 1)
        largest = new
    base = tl.where(largest == float("-inf"), 0.0, largest)
    place = tl.program_id(1).to(tl.int64) * examples + example
    tl.store(sums + place, base + tl.log(total), mask=example < examples)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    query,
    rows,
    bias,
    examples,
    classes,
    rank,
    log_z,
    largest,
    group_size,
    HAS_BIAS: tl.constexpr,
    EXAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    RANK: tl.constexpr,
) -> Any:
    """Write the largest log p̂ of one tile of classes over the examples of one group."""
    tiles = tl.cdiv(classes, CLASSES)
    group = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * CLASSES + tl.arange(0, CLASSES)
    start = group * group_size
    end = min(start + group_size, examples)
    found = tl.full([CLASSES], float("-inf"), tl.float32)
    for first in range(start, end, EXAMPLES):
        example = first + tl.arange(0, EXAMPLES)
        scores = _products(query, rows, example, column, end, classes, rank, EXAMPLES, CLASSES, RANK)
        normaliser = tl.load(log_z + example, mask=example < end, other=float("inf"))
        # NaN compares as False.
        counts = (normaliser < float("inf")) & (normaliser > float("-inf"))
        scores = tl.where(counts[:, None], scores - normaliser[:, None], float("-inf"))
        found = tl.maximum(found, tl.max(scores, 0))
    if HAS_BIAS:
        found += tl.load(bias + column, mask=column < classes, other=0.0)
    place = group.to(tl.int64) * classes + column
    tl.store(largest + place, found, mask=column < classes)
