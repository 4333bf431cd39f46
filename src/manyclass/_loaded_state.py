"""Modules whose buffers change size with the counts, and which derive constants from those buffers."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def follow_loaded_state(module: M, then: Callable[[M, object], None] | None = None) -> None:
    """Let `load_state_dict` give the module's buffers other sizes, and call a function afterwards.

    Args:
        module: the owner of the buffers; those of its children are not affected.
        then: called with the module and torch's list of incompatible keys. It checks the buffers, which kernels trust,
            and derives constants from them. It is a function of the class and not a closure, so that copies and
            pickles of the module keep it.
    """
    hooked: nn.Module = module
    hooked.register_load_state_dict_pre_hook(_make_room)
    if then is not None:
        hooked.register_load_state_dict_post_hook(then)


def _make_room(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor) and loaded.shape != buffer.shape:
            setattr(module, name, buffer.new_empty(loaded.shape))
