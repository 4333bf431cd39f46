"""Effect of the steps that a row has missed, for many rows at once, in O(log T).

With zero gradient a step takes the weight and the velocity of a row from (w, v) to M (w, v), with a 2×2 matrix M that
is the same for all rows. A row that has seen the steps [0, s) of T is brought up to date by M_{T-1} ⋯ M_s.

The history keeps the product over every aligned run of steps [s, s + 2^l), where 2^l divides s, at index 2s + 2^l of
one table. The index is different for each run and below 2T; index 0 holds the identity. That takes 64 bytes a step.
A product over [s, T) climbs upwards from s, over at most one aligned run for each bit of s, until it meets one of the
runs into which the bits of T divide [0, T). From there the products to the end are the same for all rows.
"""

import math
from typing import TypedDict

import torch
from torch import Tensor

# Entries in row order: (w ← w, w ← v, v ← w, v ← v). A list, so that a state dict can hold it.
Matrix = list[float]

_INITIAL_STEPS = 64


class StepHistory(TypedDict):
    """Products over the steps so far, as plain data: torch.load reads no other with `weights_only=True`."""

    steps: int
    # The product over the run of each bit of `steps`, from the highest. A copy on the CPU: the table may be on a GPU.
    runs: list[Matrix]
    table: Tensor


def empty(device: torch.device) -> StepHistory:
    """Return a history of no steps."""
    return {"steps": 0, "runs": [], "table": _identity(2 * _INITIAL_STEPS, device)}


def check_history(history: object) -> int:
    """Check a loaded history, whose table is read by index, and return its number of steps.

    Raises:
        ValueError: the steps, runs or table cannot come from `append`.
    """
    if not isinstance(history, dict) or set(history) != set(StepHistory.__annotations__):
        raise ValueError("`history` must have steps, runs and a table, got others")
    steps, runs, table = history["steps"], history["runs"], history["table"]
    if not isinstance(table, Tensor) or table.dtype != torch.float64 or table.shape[1:] != (2, 2):
        raise ValueError("`history` must have a table of matrices [N, 2, 2] of float64, got another")
    if type(steps) is not int or not 0 <= 2 * steps <= len(table) or len(table) < 2 * _INITIAL_STEPS:
        raise ValueError(f"`history` must have as many steps as half its table of {len(table)}, at most, got {steps}")
    good = isinstance(runs, list) and len(runs) == steps.bit_count() and all(map(_is_matrix, runs))
    if not good:
        raise ValueError(f"`history` must have a matrix for each bit of its {steps} steps, got others")
    return steps


def _is_matrix(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(x) is float and math.isfinite(x) for x in value)


def append(history: StepHistory, matrix: Matrix) -> None:
    """Add a step, and the runs that it completes."""
    steps, table = history["steps"], history["table"]
    if 2 * steps + 1 >= len(table):
        history["table"] = table = torch.cat([table, _identity(len(table), table.device)])
    start, size = steps, 1
    table[2 * start + size] = _matrices([matrix], table.device)[0]
    while steps & size:
        matrix = _product(matrix, history["runs"].pop())
        start, size = start - size, 2 * size
        table[2 * start + size] = _matrices([matrix], table.device)[0]
    history["runs"].append(matrix)
    history["steps"] = steps + 1


def since(history: StepHistory, start: Tensor) -> Tensor:
    """Return products [N, 2, 2] over the runs of steps [start, T), for starts [N] in [0, T]."""
    steps, table = history["steps"], history["table"]
    product = _identity(1, table.device).expand(len(start), 2, 2)
    for level in range(steps.bit_length()):
        size = 1 << level
        taken = (start & size != 0) & (start + size <= steps)
        product = table[torch.where(taken, 2 * start + size, 0)] @ product
        start = torch.where(taken, start + size, start)
    ends, suffixes = _suffixes(history)
    return suffixes[torch.searchsorted(ends, start)] @ product


def _suffixes(history: StepHistory) -> tuple[Tensor, Tensor]:
    """Return the starts of the runs that T falls into, then T [R + 1], and the products from there on [R + 1, 2, 2]."""
    starts, products = [history["steps"]], [[1.0, 0.0, 0.0, 1.0]]
    for run in reversed(history["runs"]):
        starts.append(starts[-1] & (starts[-1] - 1))
        products.append(_product(products[-1], run))
    device = history["table"].device
    return _on_device(torch.tensor(starts[::-1]), device), _matrices(products[::-1], device)


def _product(after: Matrix, before: Matrix) -> Matrix:
    a, b, c, d = after
    e, f, g, h = before
    return [a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h]


def _identity(number: int, device: torch.device) -> Tensor:
    return torch.eye(2, dtype=torch.float64, device=device).repeat(number, 1, 1)


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    # A copy to a GPU is asynchronous only from pinned memory.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _matrices(products: list[Matrix], device: torch.device) -> Tensor:
    return _on_device(torch.tensor(products, dtype=torch.float64).reshape(-1, 2, 2), device)
