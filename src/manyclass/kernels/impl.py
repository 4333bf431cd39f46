"""The implementations that users can choose, and the one place that decides when Triton's kernels run."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from manyclass._context import is_transformed
from manyclass.kernels import triton

IMPLS = ("auto", "eager", "triton")

_of_head: ContextVar[str] = ContextVar("impl", default="auto")


def implementation(impl: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `runs_triton` follows the choice of the head whose loss is computed.

    For the draw and the targets, which have no such option.
    """
    # In compiled graphs, draws and targets are torch's operators alone.
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _chosen(impl)


@contextlib.contextmanager
def _chosen(impl: str) -> Iterator[None]:
    token = _of_head.set(impl)
    try:
        yield
    finally:
        _of_head.reset(token)


def runs_triton(*tensors: Tensor, impl: str | None = None) -> bool:
    """Return True if Triton's kernels of a draw or a row update are to work on these tensors.

    Args:
        tensors: the operands.
        impl: one of `IMPLS`; None: the choice of the head whose loss is computed, "auto" outside of one.

    Raises:
        ValueError: the user has chosen them, and they cannot run on the device.
    """
    # Values of torch.func, and traced ones, go through torch's operators.
    if is_transformed():
        return False
    impl = _of_head.get() if impl is None else impl
    if impl == "eager":
        return False
    if impl == "auto":
        return triton.is_available(*tensors)
    for tensor in tensors:
        if not triton.is_available(tensor.detach()):
            raise ValueError(
                f"`impl` must be 'auto' or 'eager' on {tensor.device}, where Triton's kernels cannot run, got 'triton'"
            )
    return True
