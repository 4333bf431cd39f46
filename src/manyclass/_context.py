"""The context that a call runs in: autocast, a transform of torch.func, torch.compile, a backward pass."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run a block that builds lasting state as if nothing surrounded the call.

    Autocast would compute it in 16 bits, `inference_mode` would make tensors that cannot be trained with, and
    `with torch.device(...)` would put them on another device: without a `device` they are made on the CPU.
    """
    with contextlib.ExitStack() as stack, torch.no_grad():
        # A step enters this block too, so it only undoes what is there.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        # A default device is one of the modes that see every call of a torch function.
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch.device("cpu"))
        yield


def fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore the global RNG state of the CPU and the device on exit."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def is_transformed() -> bool:
    """Return True inside torch.compile, torch.export or a transform of torch.func.

    Tensors made there are symbols or wrappers that end with the call, so no lasting state may be built from them.
    """
    return torch.compiler.is_compiling() or is_functional()


def is_functional() -> bool:
    """Return True inside a transform of torch.func. In a compiled graph, which holds none of ours, return False."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_in_backward() -> bool:
    """Return True inside a backward pass, where only torch.utils.checkpoint calls a module."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Return True inside torch.utils.checkpoint with `use_reentrant=False`, in the forward pass and its recomputation.

    With `use_reentrant=True` it is False: the forward pass runs without gradients and leaves no trace.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    # Other hooks, such as save_on_cpu, recompute nothing.
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
