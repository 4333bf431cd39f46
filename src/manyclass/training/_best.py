"""The best evaluation so far."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class Best:
    """Remembers the best evaluation and, if asked, the parameters that had it.

    Args:
        modules: whose tensors to keep; None: keep none.
    """

    def __init__(self, modules: nn.Module | None) -> None:
        self._modules = modules
        self._tensors: dict[str, Tensor] | None = None
        self.loss = self.cost = math.inf
        self.step: int | None = None
        self.waited = 0

    def update(self, cost: float, loss: float, step: int) -> None:
        """An evaluation, the better the less its cost: better than the best, or one more that was not."""
        self.waited += 1
        if cost < self.cost:
            self.cost, self.loss, self.step, self.waited = cost, loss, step, 0
            self._tensors = None if self._modules is None else _copies(self._modules)

    def restore(self) -> None:
        """Give the modules the tensors of the best evaluation, if they were kept."""
        if self._modules is not None and self._tensors is not None:
            # Not strict: of extra state, which is no tensor, there is no copy.
            self._modules.load_state_dict(self._tensors, strict=False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "cost": self.cost,
            "loss": self.loss,
            "step": self.step,
            "waited": self.waited,
            "tensors": self._tensors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cost, self.loss, self.step, self.waited = (state[name] for name in ("cost", "loss", "step", "waited"))
        self._tensors = state["tensors"]


@torch.no_grad()
def _copies(modules: nn.Module) -> dict[str, Tensor]:
    """Copies of all that is saved of the modules; a tensor that several share is copied once."""
    own = {name: value for name, value in modules.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    copies = {id(value): value.detach().clone() for value in {id(value): value for value in own.values()}.values()}
    return {name: copies[id(value)] for name, value in own.items()}
