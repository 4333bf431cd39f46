"""The tensors that Triton's kernels can work on."""

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_MAX_REASON_CHARACTERS = 300
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

log = logging.getLogger("manyclass")


def is_available(*tensors: Tensor) -> bool:
    """Return True if kernels can work on these tensors: plain ones on a GPU, outside torch.compile and torch.func."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if not tensor.is_cuda or type(tensor) not in _PLAIN or _is_wrapped(tensor):
            return False
    return all(compiles(tensor.device) for tensor in tensors)


def is_available_in_graphs(table: Tensor) -> bool:
    """Return True if operators of a compiled graph can launch kernels on the device of a table."""
    return table.is_cuda


@functools.cache
def compiles(device: torch.device) -> bool:
    """Return True if Triton is installed and can compile for a GPU; False if the variable MANYCLASS_NATIVE is 0."""
    if os.environ.get("MANYCLASS_NATIVE") == "0" or importlib.util.find_spec("triton") is None:
        return False
    from manyclass.kernels.triton.exponentials import exponentials_

    scores, target = torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    try:
        # Triton needs a C compiler, and a GPU that it knows.
        exponentials_(scores, 0, bias=None, target=target, shift=torch.zeros(1, device=device))
    except Exception as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS]
        log.warning("manyclass runs without its GPU kernels, somewhat slower: %s: %s", type(error).__name__, reason)
        return False
    return True
