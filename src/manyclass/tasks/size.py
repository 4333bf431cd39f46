"""Whether a model is too large to be built here."""

import os

import torch

from manyclass.errors import UserError
from manyclass.tasks.task import ModelSpec

# Tables of the size of the parameters: they themselves, and what an optimiser remembers.
_TABLES = {"adagrad": 2, "adam": 3, "sgd": 1}


def check_size(spec: ModelSpec, device: str) -> None:
    """Raise, before memory is taken, where a training cannot have what its model needs.

    Raises:
        UserError: it takes more memory than there is.
    """
    tables = _TABLES.get(spec.settings.optimizer or "", 1)
    size = 4 * tables * num_parameters(spec)
    if (there := _memory(device)) is not None and size > there:
        raise UserError(
            f"the model must fit into memory: with its optimiser it takes {size / 2**30:,.1f} GiB, and there are "
            f"{there / 2**30:,.1f}; a smaller `--dim` or `--rank` takes less"
        )


def num_parameters(spec: ModelSpec) -> int:
    """Of the model that a spec is for.

    Raises:
        UserError: more than can be counted.
    """
    try:
        with torch.device("meta"):
            built = spec.build()
    except (RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the model must fit into memory, got one whose size cannot be counted: {reason}") from None
    classes = len(spec.names)
    own = 0 if built.tied is not None else classes * built.dim
    return sum(parameter.numel() for parameter in built.encoder.parameters()) + own + (classes if built.bias else 0)


def _memory(device: str) -> int | None:
    """Bytes that a device has; None where it does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
