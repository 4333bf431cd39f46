"""ctypes bindings of cells.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from manyclass.kernels.cpu._operands import address
from manyclass.kernels.cpu.build import bind, is_available


@functools.cache
def _probe() -> Callable[..., None]:
    batch, nodes, tree = (c_void_p, c_int64, c_int64), (c_void_p, c_int64, c_int64), (c_void_p, c_void_p, c_int64)
    classes = (c_void_p, c_int64, c_void_p, c_void_p)
    return bind("manyclass_probe", *batch, *nodes, *tree, *classes, c_int64, c_void_p, c_void_p, c_int)


def can_probe(hidden: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor) -> bool:
    """Return True if the kernel can search with these: contiguous float32, and int32 ids."""
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    floats = all(x.dtype is torch.float32 and x.is_contiguous() for x in operands)
    return floats and order.dtype is torch.int32 and is_available(*operands)


def probe(
    hidden: Tensor,
    node_scores: Tensor,
    centroids: Tensor,
    levels: Tensor,
    order: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    nodes: int,
    probes: int,
) -> tuple[Tensor, Tensor]:
    """Return the best cells, int64 [B, P] in ascending order, and log p̂ of their classes [B, P, M].

    Args:
        hidden: [B, D].
        node_scores: [B, Q]; overwritten.
        centroids: [J, D], of J/Q cells for each node.
        levels: [J].
        order: int32 [C], a permutation: the classes cell by cell.
        weight: the table [C, D].
        bias: [C], or None.
        nodes: the number of nodes that an example probes.
        probes: the number of their cells that it probes, P.

    Raises:
        TypeError: an operand has another dtype than float32, or int32 for `order`.
        ValueError: an operand has another size or is not contiguous CPU memory; there are fewer nodes or cells.
    """
    (batch, dim), num_nodes, num_cells, classes = hidden.shape, node_scores.shape[1], len(levels), len(order)
    if not 1 <= nodes <= num_nodes or num_cells % num_nodes or not 1 <= probes <= nodes * (num_cells // num_nodes):
        raise ValueError(
            f"`probes` must be cells of {nodes} nodes of {num_nodes}, with {num_cells} cells in all, got {probes}"
        )
    cells = torch.empty(batch, probes, dtype=torch.int64, device="cpu")
    log_p = torch.empty(batch, probes, -(-classes // num_cells), device="cpu")
    _probe()(
        address("hidden", hidden, torch.float32, batch * dim),
        batch,
        dim,
        address("node_scores", node_scores, torch.float32, batch * num_nodes),
        num_nodes,
        nodes,
        address("centroids", centroids, torch.float32, num_cells * dim),
        address("levels", levels, torch.float32, num_cells),
        num_cells,
        address("order", order, torch.int32, classes),
        classes,
        address("weight", weight, torch.float32, classes * dim),
        0 if bias is None else address("bias", bias, torch.float32, classes),
        probes,
        cells.data_ptr(),
        log_p.data_ptr(),
        torch.get_num_threads(),
    )
    return cells, log_p
