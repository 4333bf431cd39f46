"""The processes that train one model under torch's DistributedDataParallel (DDP)."""

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@runtime_checkable
class SparseTables(Protocol):
    """A module some of whose parameters have row-sparse gradients."""

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Return these parameters."""
        ...


def active_ddp() -> Any:
    """Return the DistributedDataParallel whose forward is running, or None."""
    return DistributedDataParallel._get_active_ddp_module()


def are_several() -> bool:
    """Return True if there are several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def accumulates() -> bool:
    """Return True in a forward under `no_sync()`: ranks may run different numbers of these, so none may exchange."""
    ddp = active_ddp()
    return ddp is not None and not ddp.require_backward_grad_sync


def check_prepared(module: object) -> None:
    """Raise if DDP would have to reduce row-sparse gradients of a module, which it cannot.

    Raises:
        RuntimeError: the DDP whose forward is running does not ignore a parameter with row-sparse gradients, or one of
            which each process has its own rows.
    """
    ddp = active_ddp()
    if ddp is None:
        return
    if any(hasattr(parameter, "shard") for parameter in ddp._module_parameters):
        raise RuntimeError(
            "a model with a divided head must be given to DistributedDataParallel as DistributedDataParallel("
            "manyclass.parallel.prepare(model)), which leaves its rows to their process, got one that was not prepared "
            "after `shard`"
        )
    if not isinstance(module, SparseTables):
        return
    tables = {id(table) for table in module.sparse_parameters() if table.requires_grad}
    if any(id(parameter) in tables for parameter in ddp._module_parameters):
        raise RuntimeError(
            f"a model with a sparse {type(module).__name__} must be given to DistributedDataParallel as "
            "DistributedDataParallel(manyclass.parallel.prepare(model)), got one that `prepare` did not return"
        )


def check_all_take_part(ddp: Any) -> None:
    """Raise if ranks may end at different steps.

    Raises:
        RuntimeError: DDP runs under `join()`.
    """
    if ddp._join_config.enable:
        raise RuntimeError(
            "`join()` must not be used, since a rank that has ended cannot exchange rows or observations: give every "
            "rank the same number of batches"
        )


def from_ranks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return these tensors of every rank, in the order of ranks; only those given outside of DDP.

    Args:
        tensors: each has the same shape on all ranks.
    """
    ddp = active_ddp()
    if ddp is None:
        return [tensors]
    check_all_take_part(ddp)
    return gathered(tensors, ddp.process_group)


def mean_over_ranks(value: float, device: torch.device) -> float:
    """Return the mean of the numbers of all ranks that are not NaN; the number itself outside of DDP."""
    if active_ddp() is None:
        return value
    numbers = [number for (number,) in from_ranks(torch.tensor([value], dtype=torch.float64, device=device))]
    return torch.cat(numbers).nanmean().item()


def gathered(tensors: tuple[Tensor, ...], group: Any) -> list[tuple[Tensor, ...]]:
    """Return tensors of every process of a group, in the order of ranks, bit for bit the same on all of them.

    Args:
        tensors: each has at least one dimension, and the same shape on all ranks.
        group: the process group.
    """
    world = dist.get_world_size(group)
    if world == 1:
        return [tensors]
    # All in one message of bytes: one wait instead of several, and gloo does not know every dtype.
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    message = torch.cat(parts)
    received = [torch.empty_like(message) for _ in range(world)]
    dist.all_gather(received, message, group=group)
    sizes = [len(part) for part in parts]
    return [
        # Cloned, since a view in another dtype must start at a multiple of its size.
        tuple(
            part.clone().view(tensor.dtype).reshape(tensor.shape)
            for part, tensor in zip(row.split(sizes), tensors, strict=True)
        )
        for row in received
    ]
