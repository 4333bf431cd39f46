"""What every kind of data gives a training, an evaluation and a prediction."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from manyclass.data.files import ReadProgress as ReadProgress
from manyclass.errors import UserError
from manyclass.tasks.model import Body, Model, Plan
from manyclass.tasks.settings import Settings


@dataclass(frozen=True)
class Source:
    """Where examples are, and how to read them. What is for another kind of data must be None.

    Args:
        data: a file, or of text and triples a folder with train, valid and test.
        held_out: a file to evaluate on. None: that of the folder, or a part of the data.
        format: of features: svmlight, csv, tsv, parquet, npz or npy. None: what the file's ending says.
        label: of tables: the column of labels.
        labels: of .npy: the file of labels.
        split, min_count: of text: what a token is, and how often one must occur to be a class.
    """

    data: Path
    held_out: Path | None = None
    format: str | None = None
    label: str | None = None
    labels: Path | None = None
    split: str | None = None
    min_count: int | None = None


@dataclass(frozen=True)
class Task:
    """What a training needs.

    Args:
        plan: of the model.
        train: batches to train on.
        held_out: batches to evaluate on, of at most so many examples; None: of all.
        about: what was read, in a few words each.
        penalty: added to the loss of a batch: of the model, its inputs and targets; None: nothing.
    """

    plan: Plan
    train: Any
    held_out: Callable[[int | None], Iterable[object]]
    about: Sequence[str]
    penalty: Callable[[Model, Any, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Questions:
    """Some examples to predict.

    Args:
        shown: what each is, in a word or a few.
        inputs: of the encoder.
        seen: ids [B, E], -1 pads: classes that an example has already; None: it has none, or nobody asked.
    """

    shown: Sequence[str]
    inputs: Any
    seen: Tensor | None = None


# The fields of a source that each kind of data has.
_OWN = {
    "features": ("format", "label", "labels"),
    "text": ("split", "min_count"),
    "sequences": (),
    "triples": (),
}


def check_source(kind: str, source: Source) -> None:
    """Raise where a source has something that is for another kind of data.

    Raises:
        UserError: it has.
    """
    for name in ("format", "label", "labels", "split", "min_count"):
        value = getattr(source, name)
        if value is not None and name not in _OWN[kind]:
            raise UserError(f"`--{name.replace('_', '-')}` must be left out for {kind}, got {value}")
    if kind == "sequences" and source.held_out is not None:
        raise UserError(f"`--held-out` must be left out for sequences, whose last items are, got {source.held_out}")


# The settings that some kinds of data have, and not others.
_SHAPES = {
    "features": ("hidden_layers", "rank"),
    "text": ("dim", "layers", "dropout", "length", "tied"),
    "sequences": ("dim", "layers", "dropout", "length", "tied"),
    "triples": ("dim", "regulariser"),
}


def check_settings(kind: str, settings: Settings) -> None:
    """Raise where settings have something that is for another kind of data.

    Raises:
        UserError: they have.
    """
    for name in sorted({name for names in _SHAPES.values() for name in names} - set(_SHAPES[kind])):
        if (value := getattr(settings, name)) is not None:
            option = {"hidden_layers": "hidden", "tied": "tied" if value else "untied"}.get(name, name)
            raise UserError(f"`--{option}` must be left out for {kind}, got {value}")


class Kind(Protocol):
    """A kind of data.

    Attributes:
        defaults: of its trainings.
        metrics: what is measured beside the likelihood.
        best_by: the metric by which the best model is chosen; "loss": by likelihood.
        seen: whether answers may be what an example has already (a user's items, true tails), where nobody says; None:
            examples have nothing of the kind.
        by_line: whether a question is a line, so that those that come by the standard input, `-`, are answered one by
            one.
    """

    @property
    def defaults(self) -> Settings: ...

    @property
    def metrics(self) -> Sequence[str]: ...

    @property
    def best_by(self) -> str: ...

    @property
    def seen(self) -> bool | None: ...

    @property
    def by_line(self) -> bool: ...

    def read(self, source: Source, settings: Settings, folder: Path, watch: ReadProgress | None = None) -> Task:
        """Read what there is to train on; files that are kept meanwhile go into the folder."""
        ...

    def build(self, plan: Plan) -> Body:
        """What comes before the head, with first parameters."""
        ...

    def evaluation(self, model: Model, source: Source) -> tuple[Iterable[object], Sequence[str]]:
        """Batches to evaluate a model on, and what they are."""
        ...

    def questions(self, model: Model, source: Source, *, size: int, seen: bool = True) -> Iterator[Questions]:
        """What a model is asked, so many at a time, as it is read, with what is seen already or without."""
        ...
