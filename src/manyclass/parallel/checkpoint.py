"""Distributed checkpoints of a model whose classes are divided, which are read on any number of processes."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from manyclass._shard import Shard
from manyclass.optim import Chained

# All processes at the time, and the group of saves on a thread.
_groups: list[Any] = []


class Stateful(Protocol):
    """A model, an optimiser or another part of a training with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that `state_dict` returned."""
        ...


def save_checkpoint(folder: Path | str, parts: Mapping[str, Stateful], *, wait: bool = True) -> Future[None]:
    """Save the parts of a training in a folder, from all processes together, by torch.distributed.checkpoint.

    The folder appears under its name when all of it is written, and replaces one of that name. So a killed process
    leaves the last checkpoint whole.

    Args:
        folder: the folder of this checkpoint, the same on all processes.
        parts: modules, optimisers and others with a state, by name, the same names on all processes.
        wait: whether to wait until it is written. If not, tensors are copied first, and the training may go on.

    Returns:
        A future that is done when the checkpoint can be read.

    Raises:
        TypeError: an optimiser that does not know of rows divided among processes holds some: distributed checkpoints
            would give every process the state of the first.
    """
    folder = Path(folder)
    partial = folder.with_name(f"{folder.name}.partial")
    state = {name: _state_of(part) for name, part in _each(parts).items()}
    if _is_first():
        shutil.rmtree(partial, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    _barrier()
    done: Future[None] = Future()

    def finish() -> None:
        # The metadata are written last, when all processes have written their parts.
        if _is_first():
            _replace(partial, folder)

    if wait or not dist.is_initialized():
        with _quiet():
            save(state, storage_writer=FileSystemWriter(partial), no_dist=not dist.is_initialized())
        finish()
        _barrier()
        done.set_result(None)
        return done
    group = _group_of_saves()
    written: Any = async_save(state, storage_writer=FileSystemWriter(partial), process_group=group)

    def finished(result: Any) -> None:
        error = result.exception()
        try:
            if error is None:
                finish()
                dist.barrier(group)
        except (OSError, RuntimeError) as failure:
            error = failure
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    written.add_done_callback(finished)
    return done


def load_checkpoint(folder: Path | str, parts: Mapping[str, Stateful]) -> None:
    """Load the parts of a training from a folder that any number of processes has saved, or one with a whole head.

    Only load checkpoints that you trust: what is no tensor is unpickled.

    Args:
        folder: the folder.
        parts: modules, optimisers and others with a state, by the names that they were saved under.

    Raises:
        FileNotFoundError: there is no complete checkpoint in the folder.
        ValueError: a part is not in it.
        TypeError: see `save_checkpoint`.
    """
    folder = Path(folder)
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"`folder` must hold a complete checkpoint, got {folder}")
    reader = FileSystemReader(folder)
    metadata, parts = reader.read_metadata(), _each(parts)
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data
    state = {name: _state_of(part) for name, part in parts.items()}
    for name, part in parts.items():
        if not any(path[0] == name for path in paths.values()):
            raise ValueError(f"`parts` must be among those saved in {folder}, got {name!r}")
        if isinstance(part, Optimizer):
            # By text, as checkpoints have the numbers of parameters.
            state[name]["state"] = _blank(part, name, paths, metadata.state_dict_metadata)
    # The order of the classes of a head that was not divided, for which a divided one has no place.
    without = {
        (name, key): state[name].pop(key)
        for name in parts
        for key, value in list(state[name].items())
        if isinstance(value, Tensor)
        and value.numel() == 0
        and isinstance(kind := metadata.state_dict_metadata.get(f"{name}.{key}"), TensorStorageMetadata)
        and kind.size != value.shape
    }
    with _quiet():
        load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    for (name, key), value in without.items():
        state[name][key] = value
    for name, part in parts.items():
        if isinstance(part, Optimizer):
            state[name]["state"] = {int(number): found for number, found in state[name]["state"].items()}
        part.load_state_dict(state[name])


def save_weights(path: Path | str, model: nn.Module) -> None:
    """Save all parameters of a model as one safetensors file, from all processes together.

    For programs that know nothing of processes: the tables in the file have a row for each class. Each process writes
    its rows, and the first one copies them into the file, so that no process holds a whole table in memory. The file
    appears under its name when all of it is written.

    Args:
        path: the file, the same on all processes.
        model: the model, the same on all processes.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    if _is_first():
        shutil.rmtree(partial, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    _barrier()
    names = {name for name, _ in model.named_parameters()}
    state = {name: value for name, value in model.state_dict().items() if name in names}
    writer = HuggingFaceStorageWriter(str(partial), save_distributed=True, enable_consolidation=True)
    with _quiet():
        save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    if _is_first():
        (written,) = partial.glob("*.safetensors")
        os.replace(written, path)
        shutil.rmtree(partial)
    _barrier()


def _each(parts: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Return the parts with each optimiser of a `Chained` as one part."""
    return {
        f"{name}.{child}" if child else name: found
        for name, part in parts.items()
        for child, found in (part.children() if isinstance(part, Chained) else {"": part}).items()
    }


def _state_of(part: Stateful) -> dict[str, Any]:
    """Return the state of a part; refuse an optimiser whose state would be that of the first process alone."""
    if isinstance(part, Optimizer) and not hasattr(part, "resize_rows"):
        for parameter in (p for group in part.param_groups for p in group["params"]):
            if hasattr(parameter, "shard"):
                raise TypeError(
                    "`parts` must have a RowSGD, RowAdagrad or RowAdam for rows that are divided among processes, got "
                    f"a {type(part).__name__}"
                )
    return part.state_dict()


def _blank(optimizer: Optimizer, name: str, paths: Mapping[str, tuple[Any, ...]], kinds: Mapping[str, Any]) -> Any:
    """Return tensors to read the saved state of an optimiser into, which a new one does not have yet."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, Any] = {}
    for key, path in paths.items():
        if path[:2] != (name, "state") or len(path) < 4:
            continue
        kind, number, value = kinds[key], int(path[2]), None
        if isinstance(kind, TensorStorageMetadata):
            parameter = parameters[number] if number < len(parameters) else None
            shard: Shard | None = getattr(parameter, "shard", None)
            device = "cpu" if parameter is None else parameter.device
            value = _blank_tensor(kind.size, kind.properties.dtype, device, shard if len(path) == 4 else None)
        inner = state
        for step in path[2:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = value
    return state


def _blank_tensor(size: torch.Size, dtype: torch.dtype, device: Any, shard: Shard | None) -> Tensor:
    if shard is None or not size or size[0] != shard.num_classes:
        return torch.empty(size, dtype=dtype, device=device)
    return shard.wrapped(torch.empty(shard.size, *size[1:], dtype=dtype, device=device))


def _replace(partial: Path, folder: Path) -> None:
    """Give a complete folder its name."""
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that there is no process group, which one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _group_of_saves() -> Any:
    """Return a group for saves on a thread, whose exchanges must not meet those of the training."""
    world = dist.group.WORLD
    if not _groups or _groups[0] is not world:
        _groups[:] = [world, dist.new_group(backend="gloo")]
    return _groups[1]


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
