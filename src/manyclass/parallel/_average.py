"""The mean of row-sparse gradients over ranks, at the end of a backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from manyclass import _ranks

DENSE = -1  # in place of a number of rows


class RowAverage:
    """A hook of a model that averages the gradients of its tables over ranks after each synchronised backward pass.

    It is due after the backward pass of a forward that DDP ran outside of `no_sync()`. The first parameter that gets a
    gradient in this pass, dense or not, asks autograd for a call at its end. So all tables are exchanged together, in
    one order on all ranks: also those that have no gradient on a rank, and those whose gradient compiled code adds
    without a hook.

    Args:
        tables: the parameters, in the same order on all ranks.
        group: the process group of the exchange.
    """

    def __init__(self, tables: Sequence[nn.Parameter] = (), group: Any = None) -> None:
        self._tables = tables
        self._group = group
        self._handles: list[RemovableHandle] = []
        # True from a synchronised forward to the end of its backward pass; and true if autograd was asked for the call.
        self._due = self._asked = False

    def __reduce__(self) -> tuple[object, ...]:
        # A copied or unpickled model has parameters without hooks, and no process group.
        return RowAverage, ()

    def attach(self, model: nn.Module) -> None:
        """Average the gradients of this model from now on, in place of an earlier hook."""
        for key, hook in list(model._forward_pre_hooks.items()):
            if isinstance(hook, RowAverage):
                hook.detach()
                model._forward_pre_hooks.pop(key, None)
        self._handles.append(model.register_forward_pre_hook(self))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._ask))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, inputs: object) -> None:
        """Note in a forward of DDP whether its backward pass is synchronised."""
        ddp = _ranks.active_ddp()
        if ddp is None or not torch.is_grad_enabled():
            return
        if self._group is None:
            raise RuntimeError("`model` must be prepared again, since it is a copy: call manyclass.parallel.prepare")
        _ranks.check_all_take_part(ddp)
        ranks, expected = (dist.get_process_group_ranks(group) for group in (self._group, ddp.process_group))
        if ranks != expected:
            raise RuntimeError(f"`process_group` of `prepare` must be that of DDP, with ranks {expected}, got {ranks}")
        if ddp.require_backward_grad_sync:
            self._due, self._asked = True, False

    def _ask(self, _: Tensor) -> None:
        if self._due and not self._asked:
            self._asked = True
            Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._due = self._asked = False
        if dist.get_world_size(self._group) > 1:
            average_rows(self._tables, self._group)


def average_rows(tables: Sequence[nn.Parameter], group: Any) -> None:
    """Replace the gradients of tables by their means over the ranks of a group; None counts as zeros.

    A gradient that is dense on one rank becomes dense on all; one that is None on all stays None.
    """
    own = [_rows(table) for table in tables]
    numbers = torch.tensor([DENSE if rows is None else len(rows[0]) for rows in own], device=tables[0].device)
    by_rank = torch.stack([ranks for (ranks,) in _ranks.gathered((numbers,), group)]).T.tolist()
    for table, rows, numbers_of_table in zip(tables, own, by_rank, strict=True):
        if DENSE in numbers_of_table:
            _average_dense(table, group)
        elif rows is not None and any(numbers_of_table):
            _average_sparse(table, *rows, numbers_of_table, group)


def _rows(table: nn.Parameter) -> tuple[Tensor, Tensor] | None:
    """Return ids [N], each once, and values [N, ...] of a row-sparse gradient; None if it is dense."""
    gradient = table.grad
    if gradient is None:
        return torch.empty(0, dtype=torch.int64, device=table.device), table.new_empty(0, *table.shape[1:])
    if not gradient.is_sparse:
        return None
    # Rows that were averaged before come back from every rank: without the sum they would multiply at each step of an
    # accumulation. It is in float32, since 16 bits would lose most of many rows.
    wide = gradient.to(torch.float32) if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    wide = wide.coalesce()
    return wide.indices()[0], wide.values().to(gradient.dtype)


def _average_sparse(table: nn.Parameter, ids: Tensor, values: Tensor, by_rank: list[int], group: Any) -> None:
    """Concatenate the rows of all ranks, divided by their number; `by_rank` has the number of rows of each."""
    missing = max(by_rank) - len(ids)
    padded = torch.cat([ids, ids.new_zeros(missing)]), torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
    received = _ranks.gathered(padded, group)
    all_ids = torch.cat([part[:number] for (part, _), number in zip(received, by_rank, strict=True)])
    all_values = torch.cat([part[:number] for (_, part), number in zip(received, by_rank, strict=True)])
    table.grad = torch.sparse_coo_tensor(
        all_ids.unsqueeze(0), all_values.div_(len(by_rank)), table.shape, check_invariants=False
    )


def _average_dense(table: nn.Parameter, group: Any) -> None:
    gradient = torch.zeros_like(table) if table.grad is None else table.grad.to_dense()
    gradient /= dist.get_world_size(group)
    dist.all_reduce(gradient, group=group)
    table.grad = gradient
