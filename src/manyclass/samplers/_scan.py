"""A scan of all classes for the largest probability that an example of a group gives to each of them."""

import math
import threading

import torch
from torch import Tensor

from manyclass._context import isolated
from manyclass._shard import Shard
from manyclass.kernels import cpu, triton

MAX_SCORES = 1 << 24  # at once

_kept = threading.local()


def scan_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the products of a scan: bfloat16 where the processor multiplies it; float64 for float64."""
    if weight.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if weight.device.type != "cpu" or _multiplies_bfloat16() else torch.float32


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _multiplies_bfloat16() -> bool:
    # Without the instruction, torch emulates the product and takes longer than in float32.
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and bool(supported())


def largest_log_p(
    query: Tensor, rows: Tensor, bias: Tensor | None, nearest: int, group_size: int
) -> tuple[Tensor, Tensor]:
    """Return max_n log p̂_n(c) [G, C], and the classes of the largest ŝ of each example, int64 [N, nearest].

    p̂ = exp ŝ / Σ exp ŝ with ŝ = query · rowᵀ + bias. The maximum is over the examples n of a group, each of which
    leaves its own nearest classes out of it. It is float32, or float64 if the rows are.

    Args:
        query: [N, r]; each run of `group_size` examples is a group, and what is left is the last one.
        rows: [C, r], of the dtype of `query`.
        bias: float32 [C], or None. A class of bias -inf is never among the nearest; -1 takes its place.
        nearest: the number of nearest classes.
        group_size: the number of examples of a group.
    """
    if nearest == 0 and rows.dtype != torch.float64 and triton.is_available(query, rows):
        from manyclass.kernels.triton import scan

        none = torch.empty(len(query), 0, dtype=torch.int64, device=query.device)
        return scan.largest_log_p(query, rows, bias, group_size), none
    groups = [_largest_of_group(group, rows, bias, nearest) for group in query.split(group_size)]
    return torch.stack([log_p for log_p, _ in groups]), torch.cat([ids for _, ids in groups])


def largest_log_p_of_part(query: Tensor, rows: Tensor, bias: Tensor | None, group_size: int, shard: Shard) -> Tensor:
    """Return max_n log p̂_n(c) [G, n] of the n classes of this process, p̂ normalised over those of all processes."""
    size = max(1, MAX_SCORES // max(1, len(rows)))

    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32

    def scores(part: Tensor) -> Tensor:
        found = (part @ rows.T).to(wide)
        return found if bias is None else found + bias

    nothing = torch.full((len(query),), -math.inf, dtype=wide, device=rows.device)
    own = [scores(part).logsumexp(1) for part in query.split(size)] if len(rows) else [nothing]
    log_z = shard.stacked(torch.cat(own)).logsumexp(0)
    largest = []
    for group, of_group in zip(query.split(group_size), log_z.split(group_size), strict=True):
        found = torch.full((len(rows),), -math.inf, dtype=wide, device=rows.device)
        for part, log_sum in zip(group.split(size), of_group.split(size), strict=True):
            found = torch.maximum(found, (scores(part) - log_sum.unsqueeze(1)).amax(0))
        largest.append(found)
    return torch.stack(largest)


def _largest_of_group(query: Tensor, rows: Tensor, bias: Tensor | None, nearest: int) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    largest = torch.full((len(rows),), -math.inf, dtype=wide, device=rows.device)
    ids = []
    # Parts of the examples, since all scores at once may take too much memory.
    for part in query.split(max(1, MAX_SCORES // len(rows))):
        if wide == torch.float32 and cpu.is_available(part, rows):
            scores = torch.mm(part, rows.T, out=_buffer(len(part), len(rows), rows.dtype))
            ids.append(cpu.likely_(largest, scores, bias, nearest))
            continue
        scores = part @ rows.T
        log_p = (scores if bias is None else scores + bias).log_softmax(1, dtype=wide)
        if nearest:
            top, found = log_p.topk(nearest)
            log_p = log_p.scatter(1, found, -math.inf)
            ids.append(found.masked_fill_(top == -math.inf, -1))
        largest = torch.maximum(largest, log_p.amax(0))
    return largest, torch.cat(ids) if nearest else torch.empty(len(query), 0, dtype=torch.int64, device=query.device)


def _buffer(examples: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor [B, C] without values, in memory that each thread keeps.

    The system clears the pages of a large new tensor, which takes as long as the product that fills it.
    """
    size = examples * classes
    kept: Tensor | None = getattr(_kept, "scores", None)
    if kept is None or kept.dtype != dtype or kept.numel() < size:
        with isolated():
            kept = _kept.scores = torch.empty(size, dtype=dtype, device="cpu")
    return kept[:size].view(examples, classes)
