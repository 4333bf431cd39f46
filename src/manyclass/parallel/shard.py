"""A head whose classes are divided among the processes of a mesh."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyclass import __version__
from manyclass._context import fork_rng
from manyclass._shard import Shard
from manyclass.counts import ClassCounts
from manyclass.heads import ClassHead
from manyclass.samplers import divide, has_rebuilds

TIMEOUT = timedelta(minutes=5)
# By ranks and time-out: all processes at the time, and the groups of the exchange and of numbers.
_groups: dict[object, tuple[object, tuple[Any, Any]]] = {}


@torch.no_grad()
def shard(head: ClassHead, mesh: DeviceMesh, *, dim: str | int = 0, timeout: timedelta = TIMEOUT) -> ClassHead:
    """Divide the classes of a head among the processes of one dimension of a mesh, in place.

    Each process keeps a run of ceil(C / ranks) classes, the last ones fewer or none: their vectors, biases, counts and
    the state of the sampler. It is called on every process with the same head, before its optimiser is made. The rows
    are those that each process has; nothing is sent. A head without values (`device="meta"`) is initialised part by
    part, so that no process ever holds all of it.

    Afterwards the head is called as before, on every process, each with other examples: as many as it likes, or none.
    All processes score all of them, each with its classes, so that the loss is that of one head with all classes. A
    draw is the same on any number of processes: they use the random numbers of the first one. As data-parallel
    training averages gradients over processes, the gradient of a class vector is the mean over processes too, and the
    mean of their losses is that of all examples by weight, however they are divided.

    - An encoder is trained by DistributedDataParallel or `fully_shard` on the same processes, with the head's
      parameters among those that it ignores.
    - Gradients are clipped by `manyclass.optim.clip_grad_norm_`, which knows that rows lie on several processes.
    - Classes lie on the line of a sampler by id, whatever its `order` was.

    Args:
        head: the head, on its device. Counts that it shares with other objects are divided too. A `weight` that was
            given to it stays whole where it came from.
        mesh: the processes.
        dim: the dimension, by name or number, among whose processes the classes are divided; every other has size 1.
        timeout: the time after which an exchange fails that a process does not join.

    Returns:
        The head.

    Raises:
        TypeError: it is no ClassHead, or its sampler cannot be divided.
        ValueError: the dimension does not exist; the processes have different heads or releases; or the head has
            something that cannot be divided: a tied embedding, an objective of neither form, `update="observed"`.
        RuntimeError: `torch.distributed` is not initialised.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from manyclass.samplers import Systematic
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> head = ClassHead(8, 1000, sampler=Systematic(torch.ones(1000), k=64))
        >>> head = shard(head, init_device_mesh("cpu", (1,), mesh_dim_names=("classes",)), dim="classes")
        >>> head(torch.randn(16, 8), torch.arange(16)).backward()
        >>> head.shard.classes
        slice(0, 1000, None)
        >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialised before `shard`, got no process group")
    line = _dimension(mesh, dim)
    part = _part(head, line, timeout)
    _compare(part, head)
    if part.ranks > 1 and has_rebuilds(head.sampler):
        # For this head alone: threads of several heads would meet in one group in any order.
        part = replace(part, background=_new_group(_ranks_of(line), timeout, "gloo"))
    has_values = not head.weight.is_meta
    divide(head.sampler, part)
    # Also those that the sampler does not use.
    for counts in head.counts:
        counts.divide(part)
    for name, table in head.named_parameters(recurse=False):
        rows = _rows(table, part)
        part.mark(rows)
        setattr(head, name, rows)
    head.shard = part
    head.sampler.attach(head.weight, head.bias)
    if not has_values:
        # Each process has other rows, also if all have the same seed.
        seed = part.seed()
        with fork_rng(head.weight.device):
            torch.manual_seed(seed)
            head.reset_parameters()
    head.register_state_dict_post_hook(_wrap)  # type: ignore[no-untyped-call]
    head.register_load_state_dict_pre_hook(_unwrap)  # type: ignore[no-untyped-call]
    head.register_load_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]
    return head


def _wrap(head: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    """Turn what has a row for each class into DTensors, as distributed checkpoints need them."""
    for name in _names_by_class(head):
        if prefix + name in state:
            state[prefix + name] = head.shard.wrapped(state[prefix + name])


def _unwrap(head: Any, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the rows of this process from DTensors, or from the tensors of a whole head."""
    for name in _names_by_class(head):
        value = state.get(prefix + name)
        if isinstance(value, Tensor):
            state[prefix + name] = head.shard.unwrapped(value)
    # Divided classes lie on the line by id, and are searched in no cells.
    known = {prefix + name for name in head.state_dict()}
    for name in [name for name in state if name.startswith(f"{prefix}sampler.") and name not in known]:
        if ".order." in name or ".search." in name:
            del state[name]
    for name in known & set(state):
        if name.endswith("line") and isinstance(state[name], Tensor):
            state[name] = state[name][:0]


def _mark(head: Any, _: object) -> None:
    """Mark the parameters again, which `assign=True` replaces."""
    for table in head.parameters(recurse=False):
        head.shard.mark(table)


def _names_by_class(head: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in head.named_parameters(recurse=False))
    # Counts that two samplers share have two names.
    for path, module in head.named_modules(remove_duplicate=False):
        yield from (f"{path}.{name}" for name in getattr(module, "by_class", ()))


def _dimension(mesh: object, dim: str | int) -> DeviceMesh:
    """Return the mesh of one dimension that this process belongs to."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"`mesh` must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if isinstance(dim, int) and not isinstance(dim, bool) and -mesh.ndim <= dim < mesh.ndim:
        index = dim % mesh.ndim
    elif isinstance(dim, str) and dim in names:
        index = names.index(dim)
    else:
        known = ", ".join(map(repr, names)) or f"0 to {mesh.ndim - 1}"
        raise ValueError(f"`dim` must be a dimension of the mesh, {known}, got {dim!r}")
    others = [mesh.size(i) for i in range(mesh.ndim) if i != index]
    if any(size > 1 for size in others):
        raise ValueError(f"`mesh` must have size 1 in dimensions other than `dim`, got {list(mesh.mesh.shape)}")
    return mesh if mesh.ndim == 1 else mesh[names[index]]


def _part(head: object, mesh: DeviceMesh, timeout: timedelta) -> Shard:
    """Return the classes of this process; its exchanges fail after the time-out."""
    ranks = _ranks_of(mesh)
    number = head.num_classes if isinstance(head, ClassHead) else 0
    if len(ranks) == 1:
        return Shard(number, 0, 1, mesh)

    # Separate from those of DDP, between whose exchanges ours would have to keep their place. Heads on the same ranks
    # share them: a group has threads and connections.
    key, world = (*ranks, timeout), dist.group.WORLD
    if key not in _groups or _groups[key][0] is not world:
        _groups[key] = world, (_new_group(ranks, timeout, None), _new_group(ranks, timeout, "gloo"))
    return Shard(number, mesh.get_local_rank(), len(ranks), mesh, *_groups[key][1])


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _new_group(ranks: list[int], timeout: timedelta, backend: str | None) -> Any:
    return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)


def _compare(part: Shard, head: object) -> None:
    """Raise on all processes if one of them has another head, or one that cannot be divided.

    Raises:
        TypeError, ValueError: see `shard`.
    """
    refusal: Exception | None = None
    try:
        _check_divisible(head)
        found = _fingerprint(head)
    except (TypeError, ValueError) as error:
        refusal, found = error, {"error": f"{type(error).__name__}: {error}"}
    everyone: list[dict[str, str]] = [found]
    if part.ranks > 1:
        everyone = [{} for _ in range(part.ranks)]
        dist.all_gather_object(everyone, found, group=part.host)
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise ValueError(f"`head` was refused on rank {rank}: {other['error']}")
    for name in found:
        values = [other.get(name) for other in everyone]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"`head` must be the same on all ranks, got other {name}: {shown}")


def _check_divisible(head: object) -> None:
    if not isinstance(head, ClassHead):
        raise TypeError(f"`head` must be a ClassHead, got a {type(head).__name__}")
    if head.shard is not None:
        raise ValueError(f"`head` must be whole, got one that is divided among {head.shard.ranks} ranks already")
    if head.is_tied:
        raise ValueError("`head` must not share its class vectors with an embedding, which has all of them")
    if not isinstance(vars(head)["_parameters"].get("weight"), nn.Parameter):
        raise ValueError("`head.weight` must be a parameter to be divided, got one that is computed")
    if any(parameter.requires_grad for parameter in _parameters_of(head.objective)):
        raise ValueError(f"`head.objective` must have no parameters that learn, got {head.objective!r}")
    if head.objective.form is None:
        raise ValueError(f"`head.objective` must have one of the two forms, got {head.objective!r}")
    if head.update != "scored":
        raise ValueError(f"`head.update` must be 'scored', got {head.update!r}")
    if not hasattr(head.sampler, "divide"):
        # It raises the error.
        divide(head.sampler, Shard(head.num_classes, 0, 1))


def _fingerprint(head: Any) -> dict[str, str]:
    """Return what must be the same on all processes, by name."""
    found = {
        "release of manyclass": __version__,
        "num_classes": str(head.num_classes),
        "dim": str(head.dim),
        "dtype": str(head.weight.dtype),
        "bias": str(head.bias is not None),
        "similarity": f"{head.similarity} × {head.scale:g}",
        "sparse": str(head.sparse),
        "objective": repr(head.objective),
        "sampler": " ".join(repr(head.sampler).split()),
        "options of the sampler": str([_options(part) for part in _modules_of(head.sampler)]),
    }
    for i, counts in enumerate(_counts(head)):
        # Counts that another head has divided already have other values on each rank.
        if counts.shard is None:
            found["digest of counts" if i == 0 else f"digest of counts {i}"] = _digest(counts.raw)
    for name, value in _state_of(head.sampler).items():
        if not _is_divided(head.sampler):
            found[f"{name} of the sampler"] = _digest(value)
    return found


def _options(sampler: nn.Module) -> dict[str, object]:
    """Return the plain options of a sampler."""
    return {name: value for name, value in vars(sampler).items() if isinstance(value, int | float | str)}


def _is_divided(sampler: object) -> bool:
    return any(getattr(part, "shard", None) is not None for part in _modules_of(sampler))


def _state_of(sampler: object) -> dict[str, Tensor]:
    state = sampler.state_dict() if isinstance(sampler, nn.Module) else {}
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _digest(value: Tensor) -> str:
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def _modules_of(part: object) -> Iterator[nn.Module]:
    yield from part.modules() if isinstance(part, nn.Module) else ()


def _parameters_of(part: object) -> Iterator[nn.Parameter]:
    yield from part.parameters() if isinstance(part, nn.Module) else ()


def _counts(head: ClassHead) -> Iterator[ClassCounts]:
    yield from head.counts
    for module in _modules_of(head.sampler):
        if isinstance(module, ClassCounts):
            yield module


def _rows(table: nn.Parameter, part: Shard) -> nn.Parameter:
    """Return the rows of this process as a parameter; of a table without values, an empty one on the mesh's device."""
    rows: Tensor = table.detach()[part.classes]
    rows = torch.empty_like(rows, device=part.device) if rows.is_meta else rows.clone()
    return nn.Parameter(rows, requires_grad=table.requires_grad)
