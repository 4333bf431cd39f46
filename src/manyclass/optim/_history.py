"""What the steps a row has missed would have done to it: for all touched rows at once, in O(log T).

With zero gradient a step takes the weight and the velocity of a row from (w, v) to M (w, v), with a 2×2 matrix M that
is the same for all rows. A row that has seen the steps [0, s) of T is brought to date by M_{T-1} ⋯ M_s.

The history keeps the product over every aligned run of steps [s, s + 2^l), where 2^l divides s, in place 2s + 2^l of
one table, which is a different one for each run and below 2T. Place 0 holds the identity. So it takes 64 bytes a step.
A run [s, T) is climbed upwards from s, over one aligned run for each bit of s, until it meets one of the runs that T
itself falls into by its bits. From there the products to the end are the same for all rows.
"""

from typing import TypedDict

import torch
from torch import Tensor

# Row by row: (w ← w, w ← v, v ← w, v ← v). A list, as a state_dict has it.
Matrix = list[float]

_FIRST_CAPACITY = 64


class History(TypedDict):
    """Plain data, lest a state_dict need more than torch.load reads with `weights_only=True`."""

    steps: int
    # For each bit of `steps` from the highest, the product over its run. Also in the table, which may be on a GPU.
    runs: list[Matrix]
    table: Tensor


def empty(device: torch.device) -> History:
    return {"steps": 0, "runs": [], "table": _identity(2 * _FIRST_CAPACITY, device)}


def append(history: History, matrix: Matrix) -> None:
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


def since(history: History, start: Tensor) -> Tensor:
    """Products [N, 2, 2] over the runs of steps [start, T), for starts [N] in [0, T]."""
    steps, table = history["steps"], history["table"]
    product = _identity(1, table.device).expand(len(start), 2, 2)
    for level in range(steps.bit_length()):
        size = 1 << level
        taken = (start & size != 0) & (start + size <= steps)
        product = table[torch.where(taken, 2 * start + size, 0)] @ product
        start = torch.where(taken, start + size, start)
    ends, suffixes = _suffixes(history)
    return suffixes[torch.searchsorted(ends, start)] @ product


def _suffixes(history: History) -> tuple[Tensor, Tensor]:
    """Where the runs that T falls into begin, and T itself [R + 1]; products from there to the end [R + 1, 2, 2]."""
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
    # Only from pinned memory does a copy to a GPU not wait for it.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _matrices(products: list[Matrix], device: torch.device) -> Tensor:
    return _on_device(torch.tensor(products, dtype=torch.float64).reshape(-1, 2, 2), device)
