"""Lookups of rows of a class table, with a dense or a row-sparse gradient."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _sparse_gradients  # noqa: F401
from manyclass._handle import Handle, owner_of


class RowLookup:
    """A lookup of rows of a parameter [C, ...].

    torch.compile cannot pass a sparse gradient through a graph. Compiled code therefore uses a pair of opaque
    operators, of which the backward one adds the sparse gradient to `parameter.grad`; in eager code autograd does
    that. (Hooks on the parameter do not see the gradient of compiled code.)

    Args:
        owner: the module that has the table as its parameter.
        name: the name of the parameter.
        sparse: whether its gradient is row-sparse.
    """

    def __init__(self, owner: nn.Module, name: str, *, sparse: bool) -> None:
        self.sparse = sparse
        self.name = name
        # The owner, not the parameter: `load_state_dict(assign=True)`, `to_empty` and `fully_shard` replace that.
        self._handle = Handle(owner)
        # The backward operator runs because autograd needs its result: the gradient of this scalar, which is 0.
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")

    def __call__(self, parameter: nn.Parameter, ids: Tensor) -> Tensor:
        """Return rows [*ids.shape, ...] of the parameter, which must be the one that the owner has now."""
        table = gathered(parameter)
        if table is not parameter:
            # The gradient of a table that was sharded is divided among the processes again, so it must be dense.
            return F.embedding(ids, table) if table.dim() == 2 else table[ids]
        if self.sparse and torch.compiler.is_compiling() and parameter.requires_grad and torch.is_grad_enabled():
            rows: Tensor = gather_rows(parameter.detach(), ids, self._anchor, self._handle.number, self.name)
            return rows
        if parameter.dim() == 2:
            return F.embedding(ids, parameter, sparse=self.sparse)
        return torch.gather(parameter, 0, ids.reshape(-1), sparse_grad=self.sparse).reshape(ids.shape)


def is_sharded(table: Tensor) -> bool:
    """Return True for a DTensor, of which each process holds a part."""
    return hasattr(table, "full_tensor")


def fill_(table: Tensor, values: Tensor) -> None:
    """Copy values into a table, which may be sharded."""
    if is_sharded(table):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(table, DTensor)
        values = distribute_tensor(values.to(table.device), table.device_mesh, table.placements)
    with torch.no_grad():
        table.copy_(values)


def gathered(table: Tensor) -> Tensor:
    """Return a whole table: `fully_shard` leaves a DTensor, of which each process holds a part, outside `forward`.

    The gradient is averaged over the processes, as `fully_shard` does.
    """
    if not is_sharded(table):
        return table
    # Imported here: without sharded tables nothing needs it, and it takes a while.
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(table, DTensor)
    return table.full_tensor(grad_placements=[Partial("avg")] * table.device_mesh.ndim)


def with_sparse_gradient(table: Tensor) -> Tensor:
    """Return the table; its gradient, which has a value in every row, becomes row-sparse with these values."""
    rows: Tensor = _AllRows.apply(table)  # type: ignore[no-untyped-call]
    return rows


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (table,) = ctx.saved_tensors
        # Kept as long as the graph, so that the hook can recognise them.
        ctx.ids = torch.arange(gradient.shape[0], device=gradient.device).unsqueeze(0)
        if table.is_leaf:
            _coalesce_when_stored(table, ctx.ids)
        return torch.sparse_coo_tensor(ctx.ids, gradient, gradient.shape, check_invariants=False, is_coalesced=True)


def _coalesce_when_stored(table: Tensor, ids: Tensor) -> None:
    """Coalesce the gradient of a table, in which every row has a value, when autograd has stored it.

    Autograd forgets that it is coalesced, and adds another sparse gradient, as that of a tied embedding, by appending
    its rows: the optimiser would sort all of them. A gradient without others is recognised by the memory of its ids.
    """
    known, backward = weakref.ref(ids), torch._C._current_graph_task_id()

    def coalesce(table: Tensor) -> None:
        handle.remove()
        if torch._C._current_graph_task_id() != backward:
            # torch.autograd.grad stores nothing, so this is the gradient of a later pass, in which rows may be missing.
            return
        gradient, ids = table.grad, known()
        if ids is None or gradient is None or not gradient.is_sparse or gradient._nnz() < ids.shape[1]:
            return
        if gradient._indices().data_ptr() == ids.data_ptr():
            gradient._coalesced_(True)
        elif gradient.is_cuda and gradient.dtype in (torch.float32, torch.float64) and not gradient.requires_grad:
            # All rows are there, so their sums form the whole table. In half precision they would be too coarse; on
            # the CPU the optimiser's kernel sums faster.
            rows = torch.zeros_like(gradient._values()[: len(table)])
            rows.index_add_(0, gradient._indices()[0], gradient._values())
            table.grad = torch.sparse_coo_tensor(ids, rows, table.shape, check_invariants=False, is_coalesced=True)

    handle = table.register_post_accumulate_grad_hook(coalesce)


def replace_target_rows(ids: Tensor, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that replaces rows of ids [N] by those of targets [B] if the class is a target.

    It takes rows [N, ...] without gradient and the targets' rows [B, ...], so that only those are in the gradient.
    """
    ascending, order = target.sort()
    place = torch.searchsorted(ascending, ids).clamp_(max=len(target) - 1)
    hit, source = ascending[place] == ids, order[place]

    def replace(rows: Tensor, target_rows: Tensor) -> Tensor:
        mask = hit if rows.dim() == 1 else hit.unsqueeze(1)
        return torch.where(mask, target_rows[source], rows)

    return replace


@torch.library.custom_op("manyclass::gather_rows", mutates_args=())
def gather_rows(table: Tensor, ids: Tensor, anchor: Tensor, handle: int, name: str) -> Tensor:
    """Look up rows; the gradient goes to the parameter of this name of the module with this handle."""
    return table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, *table.shape[1:])


@gather_rows.register_fake
def _(table: Tensor, ids: Tensor, anchor: Tensor, handle: int, name: str) -> Tensor:
    return table.new_empty(*ids.shape, *table.shape[1:])


@torch.library.custom_op("manyclass::add_sparse_gradient", mutates_args=())
def add_sparse_gradient(gradient: Tensor, ids: Tensor, handle: int, name: str) -> Tensor:
    """Add a row-sparse gradient to the parameter of this name of the module with this handle."""
    parameter: nn.Parameter = getattr(owner_of(handle), name)
    rows = gradient.reshape(ids.numel(), *parameter.shape[1:])
    sparse = torch.sparse_coo_tensor(ids.reshape(1, -1), rows, parameter.shape, check_invariants=False)
    parameter.grad = sparse if parameter.grad is None else parameter.grad + sparse
    return torch.zeros((), device="cpu")


@add_sparse_gradient.register_fake
def _(gradient: Tensor, ids: Tensor, handle: int, name: str) -> Tensor:
    return torch.zeros((), device="cpu")


def _save(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, int, str], output: Tensor
) -> None:
    _, ids, _, handle, name = inputs
    ctx.save_for_backward(ids)
    ctx.owner = handle, name  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[None, None, Tensor, None, None]:
    (ids,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return None, None, add_sparse_gradient(gradient, ids, *ctx.owner), None, None  # type: ignore[attr-defined]


gather_rows.register_autograd(_backward, setup_context=_save)
