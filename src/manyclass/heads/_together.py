"""The batch of all processes among which the classes of a head are divided, and the reduction of its losses.

Every process gives as many examples as it likes. All score all of them, each with its classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyclass import _check
from manyclass._shard import Shard
from manyclass.heads.examples import Examples

ABSENT = -1  # the width of an argument that a process does not have
# Under autocast the hidden vectors of processes may differ in dtype: the last of these is taken.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Own:
    """The examples of this process among those of all.

    Args:
        examples: its examples.
        kept: bool [B], those that are not ignored, if the others were left out of the exchange; None: all are in it.
        sizes: the number of examples that each process gives.
    """

    examples: Examples
    kept: Tensor | None
    sizes: tuple[int, ...]


def loss_together(
    shard: Shard, arguments: Callable[[], Examples], losses: Callable[[Examples], Tensor], reduction: str
) -> Tensor:
    """Return the loss of the examples of this process, over the classes of all.

    The mean is such that its mean over processes is the weighted mean over all examples, however they are divided.

    Args:
        shard: the classes of this process.
        arguments: returns the examples of this process, or raises an error.
        losses: returns the losses [ΣB] of the examples of all processes, 0 for ignored ones.
        reduction: "mean", "sum" or "none".

    Raises:
        RuntimeError: another process has refused its arguments.
    """
    own, everyone = examples_of_all(shard, arguments)
    loss = shard.own(losses(everyone), own.sizes)
    given = own.examples
    if own.kept is not None:
        loss = loss.new_zeros(len(own.kept)).masked_scatter(own.kept, loss)
    if reduction != "mean":
        return given.reduce(loss, reduction)
    share = torch.ones_like(loss) if given.weight is None else given.weight.detach().to(loss.dtype)
    if given.valid is not None:
        share = torch.where(given.valid, share, 0.0)
    weight = shard.summed(share.sum())
    return shard.ranks * given.reduce(loss, "sum") / weight.clamp(min=torch.finfo(loss.dtype).tiny)


def examples_of_all(shard: Shard, arguments: Callable[[], Examples]) -> tuple[Own, Examples]:
    """Return the examples of this process and those of all, without weights; ignored ones are left out if that is free.

    Raises:
        RuntimeError: another process has refused its arguments.
    """
    error, own = None, None
    try:
        own = arguments()
    except (TypeError, ValueError) as raised:
        error = raised
    found = _described(own)
    table = shard.vectors(torch.tensor(found, dtype=torch.int64, device="cpu"))
    if error is not None:
        raise error
    assert own is not None
    if refused := table[:, 0].nonzero().squeeze(1).tolist():
        raise RuntimeError(f"the arguments of the head were refused on rank {refused[0]} of its classes: see its error")
    _, number, present, excluded, included, has_log_z, needs_gradient, dtype = table.amax(0).tolist()
    if table[:, 5].amin() != has_log_z:
        raise ValueError("`log_z` must be given on all ranks or on none, got it on some")
    if number == 0:
        raise ValueError("`target` must hold at least one class on one of the ranks, got none")
    # If all examples of all processes are ignored, they stay, so that there is a loss.
    kept = own.valid if present and own.valid is not None and _check.reads_values(own.valid) else None
    part = own if kept is None else own.at(kept)
    column = 2 if present and _check.reads_values(own.target) else 1
    sizes = tuple(table[:, column].tolist())
    hidden, log_z = part.hidden.to(_DTYPES[dtype]), part.log_z
    if needs_gradient and torch.is_grad_enabled():
        # All processes must take part in the exchange of gradients.
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        log_z = log_z if log_z is None or log_z.requires_grad else log_z.detach().requires_grad_()
    valid = part.valid
    if column == 1:
        valid = torch.ones_like(part.target, dtype=torch.bool) if valid is None else valid
        valid = shard.gathered(valid, sizes)
    else:
        valid = None
    everyone = replace(
        part,
        hidden=shard.together(hidden, sizes),
        target=shard.gathered(part.target, sizes),
        valid=valid,
        weight=None,
        exclude=_widened(shard, part, part.exclude, excluded, sizes),
        include=_widened(shard, part, part.include, included, sizes),
        log_z=None if log_z is None else shard.together(log_z, sizes),
        shape=torch.Size([sum(sizes)]),
        share=None,
    )
    return Own(own, kept, sizes), everyone


def _described(own: Examples | None) -> list[int]:
    """Return what other processes must know of the examples of one, all of them numbers of the host."""
    if own is None:
        return [1, 0, 0, ABSENT, ABSENT, 0, 0, 0]
    number = present = len(own.target)
    if own.valid is not None and _check.reads_values(own.valid):
        present = int(own.valid.sum())
    widths = [ABSENT if x is None else x.shape[1] for x in (own.exclude, own.include)]
    learns = own.hidden.requires_grad or (own.log_z is not None and own.log_z.requires_grad)
    return [0, number, present, *widths, int(own.log_z is not None), int(learns), _DTYPES.index(own.hidden.dtype)]


def _widened(shard: Shard, part: Examples, ids: Tensor | None, width: int, sizes: tuple[int, ...]) -> Tensor | None:
    """Return the ids [ΣB, width] of all processes, padded with -1; None if no process has any."""
    if width == ABSENT:
        return None
    padded = part.target.new_full((len(part.target), width), -1)
    if ids is not None:
        padded[:, : ids.shape[1]] = ids
    return shard.gathered(padded, sizes)


def query_together(
    shard: Shard, hidden: Tensor, ids: Tensor | None, answer: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the answers for the hidden vectors of this process, over the classes of all.

    Args:
        shard: the classes of this process.
        hidden: [N, D].
        ids: int64 [N, K], or None; K may differ between processes.
        answer: returns tensors [ΣN, ...] for the hidden vectors and the ids, padded with -1, of all processes.
    """
    width = ABSENT if ids is None else ids.shape[1]
    numbers = torch.tensor([len(hidden), width, int(hidden.requires_grad)], device="cpu")
    table = shard.vectors(numbers)
    sizes, most = tuple(table[:, 0].tolist()), int(table[:, 1].max())
    if table[:, 2].any() and torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    wide = None
    if ids is not None:
        wide = ids.new_full((len(ids), most), -1)
        wide[:, :width] = ids
        wide = shard.gathered(wide, sizes)
    return tuple(shard.own(x, sizes) for x in answer(shard.together(hidden, sizes), wide))


# Compiled code leaves the exchange to eager code. Assigned, since a decorator would hide the types.
if not TYPE_CHECKING:
    loss_together, query_together = map(torch.compiler.disable, (loss_together, query_together))
