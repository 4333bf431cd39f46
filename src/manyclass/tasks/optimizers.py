"""The optimisers and schedulers of a model."""

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from manyclass.encoders import DividedEmbedding
from manyclass.registry import LEARNING_RATES, OPTIMIZERS
from manyclass.tasks.model import Model
from manyclass.tasks.settings import Settings


def make_optimizers(model: Model) -> list[Optimizer]:
    """Return a row optimiser for the class and input vectors, and Adam for all other parameters."""
    settings = model.spec.settings
    rows = {id(p): p for p in model.head.parameters()} | {id(p): p for p in _sparse(model.encoder)}
    others = [p for p in model.encoder.parameters() if id(p) not in rows]
    name = settings.optimizer or "adagrad"
    made = [OPTIMIZERS[name](rows.values(), settings.learning_rate or LEARNING_RATES[name])]
    return [*made, torch.optim.Adam(others, settings.encoder_learning_rate or 0.001)] if others else made


def make_schedulers(optimizers: Sequence[Optimizer], settings: Settings, batches: int) -> list[LambdaLR]:
    """Return schedulers that decay the learning rates linearly to 0 over the epochs; constant if there are none."""
    if not settings.decay:
        return []
    steps = math.inf if settings.epochs is None else settings.epochs * batches
    return [LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps)) for optimizer in optimizers]


def _sparse(encoder: nn.Module) -> Iterable[nn.Parameter]:
    for module in encoder.modules():
        if isinstance(module, DividedEmbedding) or (isinstance(module, nn.Embedding) and module.sparse):
            yield cast("nn.Parameter", module.weight)
        elif callable(given := getattr(module, "sparse_parameters", None)):
            yield from given()
