"""Rows of a class table, with a gradient that is dense or holds only the rows looked up."""

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_parameters: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
_handles = itertools.count()


class RowLookup:
    """Looks up rows of a parameter [C, ...].

    torch.compile cannot pass a sparse gradient through a graph. Compiled code therefore uses a pair of opaque
    operators: the backward one adds the sparse gradient to `parameter.grad` itself, where eager code has autograd do
    it. (Hooks on the parameter do not see it then.)

    Args:
        parameter: the table.
        sparse: whether its gradient is row-sparse.
    """

    def __init__(self, parameter: nn.Parameter, *, sparse: bool) -> None:
        self.sparse = sparse
        self._handle = next(_handles)
        _parameters[self._handle] = parameter
        # The backward operator runs because something needs its result: this scalar, whose gradient is 0.
        self._anchor = torch.zeros((), requires_grad=True)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy or a pickle of a head gets a lookup of its own parameter.
        return _restore, (_parameters[self._handle], self.sparse)

    def __call__(self, parameter: nn.Parameter, ids: Tensor) -> Tensor:
        """Rows [*ids.shape, ...] of the parameter, which is the one it was made for."""
        if self.sparse and torch.compiler.is_compiling() and parameter.requires_grad and torch.is_grad_enabled():
            rows: Tensor = gather_rows(parameter.detach(), ids, self._anchor, self._handle)
            return rows
        if parameter.dim() == 2:
            return F.embedding(ids, parameter, sparse=self.sparse)
        return torch.gather(parameter, 0, ids.reshape(-1), sparse_grad=self.sparse).reshape(ids.shape)


def _restore(parameter: nn.Parameter, sparse: bool) -> RowLookup:
    return RowLookup(parameter, sparse=sparse)


def observed(ids: Tensor, target: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """For ids [N] and targets [B], a function of rows [N, ...] and the targets' rows [B, ...]: it puts the latter in
    the place of the former where the class is a target, so that only targets' rows are in the gradient."""
    ascending, order = target.sort()
    place = torch.searchsorted(ascending, ids).clamp_(max=len(target) - 1)
    hit, source = ascending[place] == ids, order[place]

    def learn(rows: Tensor, target_rows: Tensor) -> Tensor:
        mask = hit if rows.dim() == 1 else hit.unsqueeze(1)
        return torch.where(mask, target_rows[source], rows)

    return learn


@torch.library.custom_op("manyclass::gather_rows", mutates_args=())
def gather_rows(table: Tensor, ids: Tensor, anchor: Tensor, handle: int) -> Tensor:
    return table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, *table.shape[1:])


@gather_rows.register_fake
def _(table: Tensor, ids: Tensor, anchor: Tensor, handle: int) -> Tensor:
    return table.new_empty(*ids.shape, *table.shape[1:])


@torch.library.custom_op("manyclass::add_sparse_gradient", mutates_args=())
def add_sparse_gradient(gradient: Tensor, ids: Tensor, handle: int) -> Tensor:
    parameter = _parameters[handle]
    rows = gradient.reshape(ids.numel(), *parameter.shape[1:])
    sparse = torch.sparse_coo_tensor(ids.reshape(1, -1), rows, parameter.shape, check_invariants=False)
    parameter.grad = sparse if parameter.grad is None else parameter.grad + sparse
    return torch.zeros(())


@add_sparse_gradient.register_fake
def _(gradient: Tensor, ids: Tensor, handle: int) -> Tensor:
    return torch.zeros(())


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    _, ids, _, handle = inputs
    ctx.save_for_backward(ids)
    ctx.handle = handle  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[None, None, Tensor, None]:
    (ids,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return None, None, add_sparse_gradient(gradient, ids, ctx.handle), None  # type: ignore[attr-defined]


gather_rows.register_autograd(_backward, setup_context=_save)
