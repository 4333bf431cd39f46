"""How good the approximation is while it trains."""

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
    """The error of log Z̃ on a few examples of the batch at hand; costs them one pass over all classes.

    Args:
        every: how many steps lie between probes.
        examples: how many, at most.
        draws: of the sampler.

    Raises:
        ValueError: one of them is below 1.
    """

    every: int = 100
    examples: int = 32
    draws: int = 4

    def __post_init__(self) -> None:
        for name in ("every", "examples", "draws"):
            _check.whole(name, getattr(self, name), 1)

    def rmse_log_z(self, head: nn.Module, hidden: Tensor, target: Tensor, *, seed: int) -> float | None:
        """The error, by draws of the seed's own; None where there is no Z̃ or no example that is not ignored."""
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
