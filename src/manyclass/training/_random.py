"""torch's global randomness: dropout and shuffling draw from it."""

import contextlib

import torch
from torch import Tensor


def undisturbed(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Whatever is drawn inside, the global generators go on as if it had not been."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def state(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator, then of the GPU's where there is one."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def restore(states: list[Tensor], device: torch.device) -> None:
    # A checkpoint may have been loaded onto a GPU; states live on the CPU.
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1].cpu(), device)
