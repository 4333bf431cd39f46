"""The settings of a model and its training, as plain values that a file can hold."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from manyclass import _check
from manyclass.errors import UserError
from manyclass.registry import check_options

# Larger models would take hours to build, or their size would overflow. Seeds of epochs are multiples of the seed, and
# must fit into 64 bits.
_LARGEST_SIZES = {
    "layers": 1000,
    "seed": 2**32 - 1,
    **dict.fromkeys(("batch_size", "dim", "hidden_layers", "rank", "length", "at"), 2**31 - 1),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a model and its training; None: the default of the task.

    Args:
        epochs, seconds: limits of the training; the first one reached ends it. Learning rates decay over epochs only.
        patience: stop after this many evaluations in a row without a new best. None: never.
        batch_size: examples per step; for text and sequences, pieces.
        optimizer: optimiser of the class and input vectors: adagrad, adam or sgd.
        learning_rate: learning rate of the class and input vectors.
        encoder_learning_rate: learning rate of all other parameters, which Adam trains.
        clip: clip the gradient norm at this value.
        decay: whether learning rates decay linearly to 0 over the epochs.
        sampler, objective: by name; None: the default of a head with counts.
        k: classes drawn per step; "auto": as many as `rmse_log_z` needs. None: "auto", or 1024 with a sampler.
        rmse_log_z: the error of log Z̃ to keep below, where k is not a number.
        at: each k of the metrics at k, such as HR@k; sequences select the best model by NDCG at the first.
        dim: dimension of the class vectors; not for features.
        hidden_layers, rank: for features, see `FeatureEncoder`.
        layers, dropout, length: for text and sequences: layers and dropout of the LSTM, length of the training pieces.
        tied: for text and sequences: whether inputs and classes share their vectors.
        regulariser: for triples: the weight of the N3 regulariser, Σ |·|³.
        seed: seed of everything random.
    """

    epochs: int | None = None
    seconds: float | None = None
    patience: int | None = None
    batch_size: int | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    encoder_learning_rate: float | None = None
    clip: float | None = None
    decay: bool | None = None
    sampler: str | None = None
    objective: str | None = None
    k: int | str | None = None
    rmse_log_z: float | None = None
    at: tuple[int, ...] | None = None
    dim: int | None = None
    hidden_layers: tuple[int, ...] | None = None
    rank: int | None = None
    layers: int | None = None
    dropout: float | None = None
    length: int | None = None
    tied: bool | None = None
    regulariser: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size", "dim", "rank", "layers", "length"):
            if (value := getattr(self, name)) is not None:
                _size(name, value)
        for name in ("seconds", "encoder_learning_rate", "clip"):
            if (value := getattr(self, name)) is not None:
                _check.number(name, value, low=0, strict=True)
        if self.dropout is not None:
            _check.fraction("dropout", self.dropout)
        if self.regulariser is not None:
            _check.number("regulariser", self.regulariser, low=0)
        for name in ("hidden_layers", "at"):
            for value in getattr(self, name) or ():
                _size(name, value)
        if self.at is not None and (not self.at or len(set(self.at)) < len(self.at)):
            raise ValueError(f"`at` must be one or more different numbers, got {self.at}")
        check_options(
            sampler=self.sampler,
            objective=self.objective,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            k=self.k,
            rmse_log_z=self.rmse_log_z,
        )
        _size("seed", self.seed, low=0)

    def over(self, defaults: "Settings") -> "Settings":
        """Return these settings, with None replaced by defaults."""
        missing = {name: value for name, value in asdict(defaults).items() if getattr(self, name) is None}
        # A limit in seconds replaces the default number of epochs.
        if self.seconds is not None:
            missing.pop("epochs", None)
        # A learning rate belongs to an optimiser: another one has another default.
        if self.optimizer not in (None, defaults.optimizer):
            missing.pop("learning_rate", None)
        return replace(self, **missing)

    def shown(self) -> str:
        """Return the settings that are given as text."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        several = {name: ",".join(map(str, value)) for name, value in given.items() if isinstance(value, tuple)}
        return ", ".join(f"{name} {value}" for name, value in (given | several).items())

    def to_json(self) -> dict[str, Any]:
        """Return the settings as `json.dumps` takes them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Settings":
        """Return the settings that `to_json` gave.

        Raises:
            UserError: the data has an unknown name or a bad value.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not set(data) <= names:
            raise UserError(f"the settings of a training must have no other names than {', '.join(sorted(names))}")
        # Python does not print an integer of thousands of digits, nor does a setting need one.
        for name, value in data.items():
            if isinstance(value, int) and value.bit_length() > 4096:
                raise UserError(f"the settings of a training are damaged: `{name}` must have fewer digits")
        try:
            several = {name: tuple(data[name]) for name in ("hidden_layers", "at") if data.get(name) is not None}
            return cls(**{**data, **several})
        except (TypeError, ValueError) as error:
            raise UserError(f"the settings of a training are damaged: {error}") from None


def _size(name: str, value: object, *, low: int = 1) -> None:
    size, most = _check.integer(name, value, low), _LARGEST_SIZES.get(name)
    if most is not None and size > most:
        raise ValueError(f"`{name}` must be at most {most}, got {size}")
