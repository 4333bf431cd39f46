"""The error of the approximation during training."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.defaults import IGNORE_INDEX
from manyclass.diagnostics import DiagnosedHead, diagnose
from manyclass.training._stepping import fork_rng


@dataclass(frozen=True)
class Probe:
    """A measurement of the error of log Z̃ on a few examples of the current batch; it scores all classes for them.

    Args:
        every: steps between probes.
        examples: examples per probe, at most.
        draws: draws of the sampler per probe.

    Raises:
        ValueError: a number is below 1.
    """

    every: int = 100
    examples: int = 32
    draws: int = 4

    def __post_init__(self) -> None:
        for name in ("every", "examples", "draws"):
            _check.integer(name, getattr(self, name), 1)

    def rmse_log_z(self, head: nn.Module, hidden: Tensor, target: Tensor, *, seed: int) -> float | None:
        """Return the error over draws of a separate generator; None without Z̃, or if all examples are ignored."""
        flat = target.reshape(-1)
        chosen = (flat != IGNORE_INDEX).nonzero()[: self.examples, 0]
        if len(chosen) == 0:
            return None
        hidden = hidden.detach().reshape(len(flat), *hidden.shape[target.dim() :])
        generator = torch.Generator(flat.device).manual_seed(seed)
        with fork_rng(flat.device):
            report = diagnose(
                cast("DiagnosedHead", head), hidden[chosen], flat[chosen], draws=self.draws, generator=generator
            )
        return report.rmse_log_z
