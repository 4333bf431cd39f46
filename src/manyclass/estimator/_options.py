"""The checked options of the classifier, and the objects made from them."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from manyclass import _check, defaults
from manyclass.counts import ClassCounts
from manyclass.objectives import Likelihood, Objective
from manyclass.registry import LEARNING_RATES, OBJECTIVES, OPTIMIZERS, check_options, make_budget, make_sampler
from manyclass.samplers import Sampler

MakeSampler = Callable[[ClassCounts, int], Sampler]

DEFAULT_EPOCHS = 50
LEAST_STEPS = 300  # with few rows an epoch is only a few steps, so there are more epochs


@dataclass(frozen=True)
class Options:
    """The parameters of `ManyClassClassifier`, except `random_state`.

    Raises:
        TypeError, ValueError: a parameter has the wrong type, is out of range, or is not a known name.
    """

    hidden_layers: Sequence[int]
    rank: int | None
    sampler: str | MakeSampler | None
    objective: str | Objective | None
    k: int | str | None
    optimizer: str
    learning_rate: float | None
    batch_size: int
    max_epochs: int | None
    early_stopping: bool
    validation_fraction: float
    n_iter_no_change: int
    device: str | torch.device | None
    verbose: int

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "Options":
        """Make options from an estimator's parameters; numbers may be NumPy scalars, as in search grids."""
        return cls(**{field.name: plain(parameters[field.name]) for field in fields(cls)})

    def __post_init__(self) -> None:
        if isinstance(self.hidden_layers, str) or not isinstance(self.hidden_layers, Sequence):
            raise TypeError(f"`hidden_layers` must be a sequence of ints, got {self.hidden_layers!r}")
        for width in self.hidden_layers:
            _check.integer("hidden_layers", width, 1)
        if self.rank is not None:
            _check.integer("rank", self.rank, 1)
        named = self.objective is None or isinstance(self.objective, str)
        if not named and (isinstance(self.objective, type) or not callable(self.objective)):
            raise TypeError(f"`objective` must be a name, an objective or None, got {self.objective!r}")
        check_options(
            sampler=None if callable(self.sampler) else self.sampler,
            objective=self.objective if named else None,
            # None is refused: this parameter has a default name.
            optimizer=str(self.optimizer),
            learning_rate=self.learning_rate,
            k=self.k,
        )
        for name in ("batch_size", "n_iter_no_change"):
            _check.integer(name, getattr(self, name), 1)
        if self.max_epochs is not None:
            _check.integer("max_epochs", self.max_epochs, 1)
        if not isinstance(self.early_stopping, bool):
            raise TypeError(f"`early_stopping` must be True or False, got {self.early_stopping!r}")
        if _check.fraction("validation_fraction", self.validation_fraction) == 0:
            raise ValueError(f"`validation_fraction` must be above 0, got {self.validation_fraction}")
        if not isinstance(self.verbose, int):
            raise TypeError(f"`verbose` must be an int, got {self.verbose!r}")
        self.place()

    def place(self) -> torch.device:
        """Return the device to train on.

        Raises:
            ValueError: torch knows no such device, or the machine has none.
        """
        if self.device is None or self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _check.available_device(self.device)

    def make_objective(self) -> Objective:
        """Build the objective."""
        if self.objective is None:
            return Likelihood()
        # An objective that learns must not change the user's parameter, so it is copied.
        return OBJECTIVES[self.objective]() if isinstance(self.objective, str) else copy.deepcopy(self.objective)

    def make_sampler(self, counts: ClassCounts) -> Sampler:
        """Build the sampler; it draws all classes if there are at most k."""
        if not callable(self.sampler):
            return make_sampler(self.sampler, counts, k=self.k)
        made = self.sampler(counts, min(self.drawn, counts.num_classes))
        if getattr(made, "num_classes", None) != counts.num_classes:
            raise ValueError(f"`sampler` must give a sampler of {counts.num_classes} classes, got {made!r}")
        return make_budget(made) if self.k == "auto" else made

    def epochs(self, num_rows: int) -> int:
        """Return the largest number of epochs over this many rows."""
        steps = -(-num_rows // self.batch_size)
        return max(DEFAULT_EPOCHS, -(-LEAST_STEPS // steps)) if self.max_epochs is None else self.max_epochs

    @property
    def drawn(self) -> int:
        """Number of classes drawn per step; with k "auto", at first."""
        return self.k if isinstance(self.k, int) else defaults.K

    @property
    def used_learning_rate(self) -> float:
        """Learning rate given, or the default of the optimiser."""
        return LEARNING_RATES[self.optimizer] if self.learning_rate is None else self.learning_rate

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Build the optimiser of parameters."""
        return OPTIMIZERS[self.optimizer](parameters, self.used_learning_rate)


def plain(value: Any) -> Any:
    """Convert NumPy scalars, also those in a sequence, to Python numbers."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list | np.ndarray):
        return tuple(plain(part) for part in value)
    return value
