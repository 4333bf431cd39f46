"""Whether a model is too large to be built here."""

import os

import torch

from manyclass.errors import UserError
from manyclass.tasks.kinds import KINDS
from manyclass.tasks.model import Plan

# Tables of the size of the parameters: they themselves, and what an optimiser remembers.
_TABLES = {"adagrad": 2, "adam": 3, "sgd": 1}


def check_size(plan: Plan, device: str) -> None:
    """Raise, before memory is taken, where a training cannot have what its model needs.

    Raises:
        UserError: it takes more memory than there is.
    """
    tables = _TABLES.get(plan.settings.optimizer or "", 1)
    size = 4 * tables * num_parameters(plan)
    if (there := _memory(device)) is not None and size > there:
        raise UserError(
            f"the model must fit into memory: with its optimiser it takes {size / 2**30:,.1f} GiB, and there are "
            f"{there / 2**30:,.1f}; a smaller `--dim` or `--rank` takes less"
        )


def num_parameters(plan: Plan) -> int:
    """Of the model that a plan is for.

    Raises:
        UserError: more than can be counted.
    """
    try:
        with torch.device("meta"):
            body = KINDS[plan.kind].build(plan)
    except (RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the model must fit into memory, got one whose size cannot be counted: {reason}") from None
    classes = len(plan.names)
    own = 0 if body.tied is not None else classes * body.dim
    return sum(parameter.numel() for parameter in body.encoder.parameters()) + own + (classes if body.bias else 0)


def _memory(device: str) -> int | None:
    """Bytes that a device has; None where it does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
