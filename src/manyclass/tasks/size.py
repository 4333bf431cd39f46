"""The memory that a model takes."""

import os

import torch

from manyclass.errors import UserError
from manyclass.tasks.task import ModelSpec

# Tables of the size of the parameters: the parameters, and the state of the optimiser.
_TABLES = {"adagrad": 2, "adam": 3, "sgd": 1}


def check_size(spec: ModelSpec, device: str) -> None:
    """Check, before memory is allocated, that a training fits into it.

    Raises:
        UserError: the training takes more memory than the device has.
    """
    tables = _TABLES.get(spec.settings.optimizer or "", 1)
    size = 4 * tables * num_parameters(spec)
    if (there := _memory(device)) is not None and size > there:
        raise UserError(
            f"the model must fit into memory: with its optimiser it takes {size / 2**30:,.1f} GiB, and there are "
            f"{there / 2**30:,.1f}; a smaller `--dim` or `--rank` takes less"
        )


def num_parameters(spec: ModelSpec) -> int:
    """Count the parameters of the model of a spec, without building it.

    Raises:
        UserError: the number overflows.
    """
    try:
        with torch.device("meta"):
            built = spec.task.build(spec)
    except (RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the model must fit into memory, got one whose size cannot be counted: {reason}") from None
    classes = len(spec.names)
    own = 0 if built.tied is not None else classes * built.dim
    return sum(parameter.numel() for parameter in built.encoder.parameters()) + own + (classes if built.bias else 0)


def _memory(device: str) -> int | None:
    """Return the bytes of memory of a device; None if unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
