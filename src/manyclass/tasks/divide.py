"""A model on several processes: classes and embeddings are divided among them, the encoder is the same on all."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyclass._shard import Shard
from manyclass.encoders import DividedEmbedding, FeatureBag
from manyclass.errors import UserError
from manyclass.tasks.model import Model
from manyclass.training import Ranks


def divide(model: Model, ranks: Ranks, device: str) -> nn.Module:
    """Divide the rows of a whole model among processes, in place, and move it to a device.

    Each process keeps its rows of the class vectors, of the sampler and of the sparse embeddings.

    Args:
        model: the model, on the CPU, built with `divisible=True` and the same on all processes.
        ranks: the processes; nothing is divided if there is only one.
        device: the device of this process.

    Returns:
        The encoder to train, which averages the gradients of its other parameters over the processes.

    Raises:
        UserError: the model has a part that cannot be divided; the message names it.
    """
    if not ranks.are_several:
        model.to(device)
        return model.encoder
    # Imported here: a single process needs none of it, and it takes a while.
    from torch.distributed.device_mesh import init_device_mesh

    from manyclass.parallel import shard

    _check_divisible(model)
    classes = model.head.weight
    mesh = init_device_mesh(torch.device(device).type, (ranks.number,))
    try:
        shard(model.head, mesh, timeout=ranks.timeout)
    except (TypeError, ValueError) as error:
        raise UserError(f"the model must be one that can be divided among {ranks.number} processes: {error}") from error
    _divide_embeddings(model, classes)
    model.to(device)
    return _data_parallel(model.encoder)


def whole(content: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return a tree in which tensors divided among processes are whole on the first process, and None on the others.

    They are gathered one after the other. All processes call it with the same tree.
    """
    known: dict[int, Tensor | None] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: gathered(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(gathered(part) for part in value)
        if not hasattr(value, "to_local"):
            return value
        rows = value.to_local()
        # A tied table has two names, and is saved once.
        storage = rows.untyped_storage()._cdata
        if storage not in known:
            known[storage] = _on_first(rows, len(value), ranks)
        return known[storage]

    return gathered(content) if ranks.are_several else dict(content)


def own_rows(content: Any, like: Any) -> Any:
    """Return a tree of whole tensors with copies of the rows of this process where `like` has divided ones.

    Args:
        content: dicts, and in them tensors and other values.
        like: dicts with the same names, as many as have divided tensors.
    """
    if isinstance(content, dict) and isinstance(like, dict):
        return {name: own_rows(value, like.get(name)) for name, value in content.items()}
    if not hasattr(like, "to_local"):
        return content
    part = Shard(len(like), like.device_mesh.get_local_rank(), like.device_mesh.size())
    return content[part.classes].clone()


def _on_first(rows: Tensor, number: int, ranks: Ranks) -> Tensor | None:
    """Return the rows of all processes on the CPU of the first one."""
    padded = rows.new_zeros(-(-number // ranks.number), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(ranks.number)] if ranks.is_first else None
    dist.gather(padded, parts, dst=0)
    return None if parts is None else torch.cat(parts)[:number].cpu()


def _check_divisible(model: Model) -> None:
    bags = [module for module in model.encoder.modules() if isinstance(module, FeatureBag)]
    if bags and not any(id(p) not in {id(bag.weight) for bag in bags} for p in model.encoder.parameters()):
        raise UserError(
            "`--hidden` must be given to train on sparse features in several processes: a linear projection of them "
            "alone cannot be averaged"
        )


def _divide_embeddings(model: Model, classes: nn.Parameter) -> None:
    """Replace the sparse embeddings of an encoder by divided ones; that of the class vectors gets those of the head."""
    part = model.head.shard
    assert part is not None
    for module in list(model.encoder.modules()):
        for name, embedding in list(module.named_children()):
            if not isinstance(embedding, nn.Embedding) or not embedding.sparse:
                continue
            rows = model.head.weight
            if embedding.weight is not classes:
                own = replace(part, num_classes=embedding.num_embeddings, sent=Counter())
                rows = nn.Parameter(embedding.weight.detach()[own.classes].clone())
                rows.shard = own  # type: ignore[attr-defined]
            setattr(module, name, DividedEmbedding(rows))


def _data_parallel(encoder: nn.Module) -> nn.Module:
    """Return an encoder that averages the gradients of its undivided parameters over processes."""
    from torch.nn.parallel import DistributedDataParallel

    from manyclass.parallel import prepare

    divided = [name for name, parameter in encoder.named_parameters() if hasattr(parameter, "shard")]
    if len(divided) == len(list(encoder.parameters())):
        return encoder
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(encoder, divided)
    return DistributedDataParallel(prepare(encoder))
