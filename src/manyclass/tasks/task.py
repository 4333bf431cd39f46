"""The interface that each kind of data implements for training, evaluation and prediction."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from manyclass.data import WHOLE, Names, Share
from manyclass.data.files import ReadProgress as ReadProgress
from manyclass.errors import UserError
from manyclass.tasks.settings import Settings


@dataclass(frozen=True)
class Source:
    """The files that examples come from, and how to read them. Fields of other kinds of data must be None.

    Args:
        data: a file; for text, sequences and triples also a folder with train, valid and test.
        held_out: a file to evaluate on. None: the one in the folder, or a part of the data.
        format: for features: svmlight, csv, tsv, parquet, npz or npy. None: by the file's ending.
        label: for tables: the column of labels.
        labels: for .npy: the file of labels.
        split, min_count: for text: the way it is split into tokens, and how often a token must occur to be a class.
    """

    data: Path
    held_out: Path | None = None
    format: str | None = None
    label: str | None = None
    labels: Path | None = None
    split: str | None = None
    min_count: int | None = None


@dataclass(frozen=True)
class EncoderSpec:
    """The encoder of a model, and the facts about it that the head needs.

    Args:
        encoder: maps inputs to vectors.
        dim: dimension of those vectors.
        tied: an embedding whose rows are the class vectors too; None: the head has separate ones.
        bias: whether classes have a bias.
    """

    encoder: nn.Module
    dim: int
    tied: nn.Embedding | None = None
    bias: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """All that determines a model, except its parameters.

    Args:
        task: the task of the kind of data that the model is for.
        names: names of the classes.
        counts: float64 [C], the number of training examples of each class.
        config: data with which the task reads inputs and builds an encoder, as `storage.save` takes it.
        settings: how the model is built and trained.
    """

    task: "Task"
    names: Names
    counts: Tensor
    config: Mapping[str, Any]
    settings: Settings


@dataclass(frozen=True)
class TrainingData:
    """The data read for a training, and the spec of the model that follows from it.

    Args:
        spec: spec of the model.
        train: batches to train on.
        held_out: returns batches to evaluate on, with at most the given number of examples; None: all.
        summary: a few lines that describe the data.
        penalty: added to the loss of a batch, from the encoder, inputs and targets; None: nothing.
    """

    spec: ModelSpec
    train: Any
    held_out: Callable[[int | None], Iterable[object]]
    summary: Sequence[str]
    penalty: Callable[[nn.Module, Any, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class PredictBatch:
    """A batch of examples to predict.

    Args:
        shown: each example as text, for the output.
        inputs: inputs of the encoder.
        seen: ids [B, E], -1 pads: classes that an example already has; None: it has none, or they were not wanted.
    """

    shown: Sequence[str]
    inputs: Any
    seen: Tensor | None = None


class Task(Protocol):
    """The work on one kind of data: reading it, building an encoder for it, and giving batches of it.

    Attributes:
        kind: the kind of data: "features", "text", "sequences" or "triples".
        source_fields: the optional fields of `Source` that apply.
        settings_fields: the fields of `Settings` that apply to some kinds of data only.
        defaults: default settings.
        metrics: names of the metrics to measure beside the likelihood; one that ends with @ is measured at each k of
            the settings.
        best_by: the metric that selects the best model, if it ends with @ at the first k; "loss": the likelihood.
        allows_seen: whether predictions include, by default, classes that an example already has (items of a user,
            true tails); None: examples have no such classes.
        by_line: whether each line is an example, so that lines of the standard input, `-`, are answered one by one.
    """

    kind: str
    source_fields: tuple[str, ...]
    settings_fields: tuple[str, ...]
    defaults: Settings
    metrics: tuple[str, ...]
    best_by: str
    allows_seen: bool | None
    by_line: bool

    def read(
        self,
        source: Source,
        settings: Settings,
        folder: Path,
        progress: ReadProgress | None = None,
        share: Share = WHOLE,
    ) -> TrainingData:
        """Read the data to train on; temporary files go into the folder, and batches hold the share of this process."""
        ...

    def build(self, spec: ModelSpec) -> EncoderSpec:
        """Build the encoder of a model, with initial parameters."""
        ...

    def evaluation_batches(
        self, spec: ModelSpec, source: Source, share: Share = WHOLE
    ) -> tuple[Iterable[object], Sequence[str]]:
        """Return batches to evaluate a model on, of which this process has a share, and lines that describe them."""
        ...

    def predict_batches(self, spec: ModelSpec, source: Source, *, size: int, seen: bool) -> Iterator[PredictBatch]:
        """Iterate over the examples to predict as they are read, with the classes they already have or without."""
        ...


def check_source(task: Task, source: Source) -> None:
    """Check that a source has no field of another kind of data.

    Raises:
        UserError: a field of another kind of data is given.
    """
    for name in [field.name for field in fields(Source)][1:]:
        if (value := getattr(source, name)) is not None and name not in task.source_fields:
            raise UserError(f"`--{name.replace('_', '-')}` must be left out for {task.kind}, got {value}")


def check_settings(task: Task, settings: Settings) -> None:
    """Check that settings have no field of another kind of data.

    Raises:
        UserError: a field of another kind of data is given.
    """
    for name in sorted({"dim", "dropout", "hidden_layers", "layers", "length", "rank", "regulariser", "tied"}):
        if (value := getattr(settings, name)) is not None and name not in task.settings_fields:
            option = {"hidden_layers": "hidden", "tied": "tied" if value else "untied"}.get(name, name)
            raise UserError(f"`--{option}` must be left out for {task.kind}, got {value}")
