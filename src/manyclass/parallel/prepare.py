"""Models with row-sparse gradients under torch's DistributedDataParallel (DDP)."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyclass._ranks import SparseTables
from manyclass.parallel._average import RowAverage

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def prepare(model: M, *, process_group: Any = None) -> M:
    """Prepare a model for DistributedDataParallel, which by itself cannot average row-sparse gradients.

    DDP is told to ignore every parameter with row-sparse gradients: those of sparse heads, encoders and embeddings.
    They start from the values of rank 0, as all parameters do. At the end of each backward pass ranks exchange the ids
    and values of their gradient rows, over a separate process group, and each rank gets the mean over ranks. It works
    under `no_sync()`, and a rank may have any number of rows, or none. Samplers start from the state of rank 0 too.
    DDP also ignores the parameters of a head that `shard` has divided, which need no exchange.

    Call it on every rank, after the model is on its device. A model with dense gradients needs it only if the state of
    its samplers was loaded on rank 0 alone. Seed ranks differently, so that each draws other classes. Under Lightning
    the callback `manyclass.integrations.lightning.SampledTraining` does both.

    Args:
        model: the model, changed in place. Prepare it again after copying, pickling, or adding parameters to it.
        process_group: the group that DDP gets. Default: all processes.

    Returns:
        The model.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError: no parameter with dense gradients is left, without which DDP refuses a model.

    Example:
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from manyclass import ClassHead
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder, self.head = nn.Linear(4, 8), ClassHead(8, 5000, sparse=True)
        ...     def forward(self, x, target):
        ...         return self.head(self.encoder(x), target)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(prepare(Model()))
        >>> model(torch.randn(16, 4), torch.arange(16)).backward()
        >>> model.module.head.weight.grad.is_sparse
        True
        >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialised before `prepare`, got no process group")
    tables = _sparse_tables(model)
    divided = {id(parameter) for parameter in model.parameters() if hasattr(parameter, "shard")}
    if (tables or divided) and not any(p.requires_grad for p in model.parameters() if id(p) not in {*tables, *divided}):
        raise ValueError(
            "`model` must have a trainable parameter with dense gradients that is not divided, without which "
            "DistributedDataParallel refuses it, got only others"
        )
    ranks = dist.get_process_group_ranks(dist.group.WORLD if process_group is None else process_group)
    # The exchange has a separate group: in DDP's own, it would have to keep its place among the buckets on every rank.
    group = dist.new_group(ranks, use_local_synchronization=True)
    for table in tables.values():
        dist.broadcast(table.data, group_src=0, group=group)
    for sampler in _samplers(model):
        # On the CPU: tensors would be received on the device of rank 0.
        state = [{name: value.cpu() for name, value in sampler.state_dict().items()}]
        dist.broadcast_object_list(state, group_src=0, group=group, device=_device(model))
        sampler.load_state_dict(state[0])
    ignored = {name for name, parameter in _every_name(model) if id(parameter) in {*tables, *divided}}
    others = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted({*others, *ignored}))
    if tables:
        RowAverage(list(tables.values()), group).attach(model)
    return model


def _sparse_tables(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the undivided trainable parameters with row-sparse gradients by their identity, each once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        tables: Sequence[Tensor] = ()
        if isinstance(module, SparseTables):
            tables = module.sparse_parameters()
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            tables = [module.weight]
        found |= {id(table): table for table in tables if isinstance(table, nn.Parameter) and table.requires_grad}
    return {key: table for key, table in found.items() if not hasattr(table, "shard")}


def _samplers(model: nn.Module) -> list[nn.Module]:
    heads = [module for module in model.modules() if hasattr(module, "sampler") and hasattr(module, "objective")]
    undivided = [head for head in heads if getattr(head, "shard", None) is None]
    return [head.sampler for head in undivided if isinstance(head.sampler, nn.Module)]


def _every_name(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all names of all parameters, as DDP forms them."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            # DDP names a parameter of the model itself in two ways.
            yield from ((f"{prefix}.{name}", parameter), (f"{prefix}.{name}".removeprefix("."), parameter))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
