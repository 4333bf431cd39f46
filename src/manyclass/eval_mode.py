"""A context manager for evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Hold modules in evaluation mode, then restore the mode of each submodule: some may have been in it before."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            part.training = mode
