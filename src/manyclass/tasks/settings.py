"""How a model is built and trained, as plain values that a file can hold."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from manyclass import _check
from manyclass.errors import UserError
from manyclass.registry import check_options

# What is larger would be built for hours, or could not be counted.
_MOST = {"layers": 1000, **dict.fromkeys(("batch_size", "dim", "hidden_layers", "rank", "length"), 2**31 - 1)}


@dataclass(frozen=True)
class Settings:
    """How to build and train; None: as fits the kind of data.

    Args:
        epochs, seconds: limits of the training, the first that is reached; epochs alone make rates fall to 0.
        patience: evaluations in a row without a better one after which it stops. None: never.
        batch_size: examples of a step; of text and interactions, sequences.
        optimizer: of the rows of classes and inputs: adagrad, adam or sgd.
        learning_rate: of the class and input vectors.
        encoder_learning_rate: of all other parameters, which Adam trains.
        clip: the greatest length of the gradient.
        decay: whether rates fall linearly to 0 over the epochs.
        sampler, objective: by name; None: what a head with counts does.
        k: classes drawn; "auto": as many as `rmse_log_z` takes.
        rmse_log_z: the error of log Z̃ wanted, where k is "auto".
        dim: of class vectors, where the features do not say it.
        hidden_layers, rank: of features, see `FeatureEncoder`.
        layers, dropout, length: of sequences: layers of the LSTM, its dropout, and how long a piece it is trained on.
        tied: of sequences: whether inputs and classes share their vectors.
        regulariser: of triples: the weight of Σ |·|³.
        seed: of everything that is random.
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
        for width in self.hidden_layers or ():
            _size("hidden_layers", width)
        check_options(
            sampler=self.sampler,
            objective=self.objective,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            k=self.k,
            rmse_log_z=self.rmse_log_z,
        )
        _check.whole("seed", self.seed, 0)

    def over(self, defaults: "Settings") -> "Settings":
        """These, and where they say nothing the defaults."""
        silent = {name: value for name, value in asdict(defaults).items() if getattr(self, name) is None}
        # Who says how many seconds it may take wants no other limit.
        if self.seconds is not None:
            silent.pop("epochs", None)
        return replace(self, **silent)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> "Settings":
        """The settings that `to_json` gave.

        Raises:
            UserError: they are none.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or not set(data) <= names:
            raise UserError(f"the settings of a training must have no other names than {', '.join(sorted(names))}")
        layers = data.get("hidden_layers")
        try:
            return cls(**{**data, "hidden_layers": None if layers is None else tuple(layers)})
        except (TypeError, ValueError) as error:
            raise UserError(f"the settings of a training are damaged: {error}") from None


def _size(name: str, value: object) -> None:
    size, most = _check.whole(name, value, 1), _MOST.get(name)
    if most is not None and size > most:
        raise ValueError(f"`{name}` must be at most {most}, got {size}")
