"""Modules whose tables change size with the counts, and which derive constants from them."""

from typing import Any

from torch import Tensor, nn


def follow_loaded_state(module: nn.Module) -> None:
    """Let the module's buffers take the sizes of those loaded into it, and have `module.derive()` called after.

    Before, `module.check_loaded()` is called where there is one: it raises a ValueError where the buffers are not what
    the module could have saved. Kernels trust them.
    """
    module.register_load_state_dict_pre_hook(_make_room)
    module.register_load_state_dict_post_hook(_derive)


# Functions of the module they are called with, and not closures over one: copies and pickles keep them.
def _make_room(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor) and loaded.shape != buffer.shape:
            setattr(module, name, buffer.new_empty(loaded.shape))


def _derive(module: Any, _: object) -> None:
    if callable(check := getattr(module, "check_loaded", None)):
        check()
    module.derive()
