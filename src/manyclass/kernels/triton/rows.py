"""Updates of the rows of a table that have a gradient: one kernel after a sort of their ids.

A row may have several gradients. Sorted by id they are neighbours, in the order in which they came; the program at the
first of them sums all in float32, always in this order, and updates the row. The programs at the others end at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manyclass.kernels.triton.sizes import cdiv, next_power_of_2

MAX_DIM = 4096  # of a row that one program holds at once
COLUMNS = 512  # of a row, where a program may update a part of it
FEW, MANY = 2, 32  # gradients of a row that are read at once: the first ones, and those that follow
TILE = 8192  # numbers in them, at most
WARPS = 4


def can_update(table: Tensor) -> bool:
    """Return True if kernels can update a table: contiguous, of at most 32 bits a number, and rows not too long."""
    fits = table.shape[1:].numel() <= MAX_DIM
    return fits and table.is_contiguous() and table.dtype in (torch.float32, torch.bfloat16, torch.float16)


def sgd_(table: Tensor, ids: Tensor, values: Tensor, *, lr: float | Tensor, seed: Tensor | None) -> None:
    """Update rows by w ← w - η g.

    Args:
        table: [C, ...].
        ids: int64 [N]; a row may repeat.
        values: their gradients [N, ...].
        lr: η; a tensor is read on the device.
        seed: int64 [1], on the device: round to bfloat16 at random, so that the mean is exact. None: to the nearest.
    """
    launch = _Launch(table, ids, values, lr, seed, whole=False)
    with torch.cuda.device_of(table):
        _sgd[launch.grid](*launch.operands, **launch.options)


def adagrad_(
    table: Tensor,
    total: Tensor,
    ids: Tensor,
    values: Tensor,
    *,
    lr: float | Tensor,
    eps: float,
    seed: Tensor | None,
) -> None:
    """Update rows by G ← G + g², w ← w - η g / (√G + ε); with `total` [C], by the mean of g² over a row.

    Args:
        table, ids, values, lr, seed: as in `sgd_`.
        total: G, float32, of the shape of the table or [C].
        eps: ε.
    """
    by_row = total.dim() < table.dim()
    launch = _Launch(table, ids, values, lr, seed, whole=by_row)
    with torch.cuda.device_of(table):
        _adagrad[launch.grid](*launch.operands, total, eps, BY_ROW=by_row, **launch.options)


def adam_(
    table: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    ids: Tensor,
    values: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    seed: Tensor | None,
) -> None:
    """Update rows by Adam, with a step count for each row.

    Args:
        table, ids, values, lr, seed: as in `sgd_`.
        first, second: the moments, float32, of the shape of the table.
        steps: float32 [C], the updates of each row so far.
        betas: β₁ and β₂.
        eps: ε.
    """
    launch = _Launch(table, ids, values, lr, seed, whole=True)
    with torch.cuda.device_of(table):
        _adam[launch.grid](*launch.operands, first, second, steps, *betas, eps, **launch.options)


class _Launch:
    """The grid and the operands that all updates share.

    Args:
        table, ids, values, lr, seed: as in `sgd_`.
        whole: whether a program must hold a whole row.
    """

    def __init__(
        self, table: Tensor, ids: Tensor, values: Tensor, lr: float | Tensor, seed: Tensor | None, *, whole: bool
    ) -> None:
        # Half the bits take half the passes of a radix sort.
        short = ids.to(torch.int32) if len(table) <= 1 << 31 else ids
        # Stable, so that equal ids stay in the order in which they came.
        ascending, order = short.sort(stable=True)
        number, dim = len(ids), table.shape[1:].numel()
        columns = next_power_of_2(dim)
        columns = columns if whole else min(columns, COLUMNS)
        # The second axis of a grid may have 65,535 programs at most, and there are many more rows than parts of a row.
        self.grid = (number, cdiv(dim, columns))
        self.operands = (table, ascending, order, values, number, dim, lr, seed)
        self.options: dict[str, Any] = {
            "READS_RATE": isinstance(lr, Tensor),
            "STOCHASTIC": seed is not None and table.dtype == torch.bfloat16,
            "FEW": max(1, min(FEW, TILE // columns)),
            "MANY": max(1, min(MANY, TILE // columns)),
            "COLUMNS": columns,
            "num_warps": WARPS if columns <= COLUMNS else 2 * WARPS,
        }


@triton.jit  # type: ignore[untyped-decorator]
def _is_first(ids, position) -> Any:  # type: ignore[no-untyped-def]
    """Return whether the id at a position differs from the one before."""
    here = tl.load(ids + position)
    return (position == 0) | (tl.load(ids + position - 1, mask=position > 0, other=-1) != here)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    ids,
    order,
    values,
    position,
    start,
    number,
    dim,
    column,
    REPEATS: tl.constexpr,
) -> Any:
    """Return the sum [COLUMNS] of those of REPEATS gradients that have the id at a position, and 1 if all have it."""
    at = start + tl.arange(0, REPEATS)
    equal = (at < number) & (tl.load(ids + at, mask=at < number, other=-1) == tl.load(ids + position))
    source = tl.load(order + at, mask=equal, other=0)
    found = tl.load(
        values + source[:, None] * dim + column[None, :], mask=equal[:, None] & (column < dim)[None, :], other=0.0
    )
    return tl.sum(found.to(tl.float32), 0), tl.where(tl.sum(equal.to(tl.int32), 0) == REPEATS, 1, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    ids,
    order,
    values,
    position,
    number,
    dim,
    column,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
) -> Any:
    """Return the sum [COLUMNS] of the gradients of the id at a position, which are neighbours from there on."""
    # Most rows have few gradients; the most frequent class of a batch may have hundreds, which are read many at once.
    total, more = _sum(ids, order, values, position, position, number, dim, column, FEW)
    start = position + FEW
    while more > 0:
        part, more = _sum(ids, order, values, position, start, number, dim, column, MANY)
        total += part
        start += MANY
    return total


@triton.jit  # type: ignore[untyped-decorator]
def rounded(x, noise) -> Any:  # type: ignore[no-untyped-def]
    """Return x in float32, rounded to a bfloat16 below or above it, so that the mean over 16 random bits is x."""
    bits = x.to(tl.int32, bitcast=True)
    # The sixteen bits that bfloat16 lacks carry over with the probability of what they are worth.
    up = ((bits + (noise & 0xFFFF)) >> 16) << 16
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, up, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    table,
    at,
    inside,
    row,
    seed,
    position,
    column,
    COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> Any:
    """Write a row, or a part of it."""
    if STOCHASTIC:
        # The place wraps at 32 bits: rows that are 2²⁰ positions apart have the same noise, still without bias.
        noise = tl.randint(tl.load(seed), position * 4096 + column)
        row = rounded(row, noise.to(tl.int32, bitcast=True))
    tl.store(table + at, row, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sgd(  # type: ignore[no-untyped-def]
    table,
    ids,
    order,
    values,
    number,
    dim,
    lr,
    seed,
    READS_RATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    position = tl.program_id(0)
    if _is_first(ids, position):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < dim
        rate = lr
        if READS_RATE:
            rate = tl.load(lr).to(tl.float32)
        gradient = _gradient(ids, order, values, position, number, dim, column, FEW, MANY)
        at = tl.load(ids + position).to(tl.int64) * dim + column
        row = tl.load(table + at, mask=inside, other=0.0).to(tl.float32) - rate * gradient
        _put(table, at, inside, row, seed, position, column, COLUMNS, STOCHASTIC)


@triton.jit  # type: ignore[untyped-decorator]
def _adagrad(  # type: ignore[no-untyped-def]
    table,
    ids,
    order,
    values,
    number,
    dim,
    lr,
    seed,
    total,
    eps,
    BY_ROW: tl.constexpr,
    READS_RATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    position = tl.program_id(0)
    if _is_first(ids, position):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < dim
        rate = lr
        if READS_RATE:
            rate = tl.load(lr).to(tl.float32)
        gradient = _gradient(ids, order, values, position, number, dim, column, FEW, MANY)
        here = tl.load(ids + position).to(tl.int64)
        at = here * dim + column
        if BY_ROW:
            squares = tl.load(total + here) + tl.sum(gradient * gradient, 0) / dim
            # Every warp reads the number that one of them writes.
            tl.debug_barrier()
            tl.store(total + here, squares)
        else:
            squares = tl.load(total + at, mask=inside, other=0.0) + gradient * gradient
            tl.store(total + at, squares, mask=inside)
        row = tl.load(table + at, mask=inside, other=0.0).to(tl.float32)
        row -= rate * gradient / (tl.sqrt(squares) + eps)
        _put(table, at, inside, row, seed, position, column, COLUMNS, STOCHASTIC)


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    table,
    ids,
    order,
    values,
    number,
    dim,
    lr,
    seed,
    first,
    second,
    steps,
    beta1,
    beta2,
    eps,
    READS_RATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> Any:
    position = tl.program_id(0)
    if _is_first(ids, position):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < dim
        rate = lr
        if READS_RATE:
            rate = tl.load(lr).to(tl.float32)
        gradient = _gradient(ids, order, values, position, number, dim, column, FEW, MANY)
        here = tl.load(ids + position).to(tl.int64)
        at = here * dim + column
        step = tl.load(steps + here) + 1.0
        m = tl.load(first + at, mask=inside, other=0.0)
        m += (gradient - m) * (1.0 - beta1)
        v = tl.load(second + at, mask=inside, other=0.0) * beta2 + gradient * gradient * (1.0 - beta2)
        # Every warp reads the number that one of them writes.
        tl.debug_barrier()
        tl.store(steps + here, step)
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)
        # In float64: in float32 1 - 0.999ⁿ has no more than four digits.
        wide_step = step.to(tl.float64)
        left1 = 1.0 - tl.exp(wide_step * tl.log(tl.zeros([], tl.float64) + beta1))
        left2 = 1.0 - tl.exp(wide_step * tl.log(tl.zeros([], tl.float64) + beta2))
        row = tl.load(table + at, mask=inside, other=0.0).to(tl.float32)
        row -= (rate / left1.to(tl.float32)) * m / (tl.sqrt(v) / tl.sqrt(left2).to(tl.float32) + eps)
        _put(table, at, inside, row, seed, position, column, COLUMNS, STOCHASTIC)
