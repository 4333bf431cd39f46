"""Rows of features, and their labels as classes."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from manyclass.data import (
    WHOLE,
    Chunk,
    Names,
    RowBatches,
    Rows,
    Schema,
    Share,
    as_inputs,
    class_counts,
    open_rows,
    spool,
)
from manyclass.encoders import FeatureEncoder
from manyclass.errors import UserError
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import EncoderSpec, ModelSpec, PredictBatch, ReadProgress, Source, TrainingData

if TYPE_CHECKING:
    from manyclass.data import Reader

HELD_OUT_ONE_IN = 20  # rows, without a held-out file
EVALUATION_ROWS = 1024  # per batch


class LabelledChunks:
    """Batches of a file as it is read, without the rows that have an unknown label.

    Attributes:
        rows: number of rows read so far.
        unknown: number of rows left out so far.
    """

    def __init__(self, reader: "Reader", names: Names, share: Share = WHOLE) -> None:
        self._reader, self._names, self._share = reader, names, share
        self.rows = self.unknown = 0

    def __iter__(self) -> Iterator[object]:
        self.rows = self.unknown = 0
        for chunk in self._reader.chunks():
            rows, known = _numbered(chunk, self._names)
            self.rows += len(rows)
            self.unknown += len(rows) - len(known)
            if len(known):
                yield from RowBatches(rows, EVALUATION_ROWS, chosen=known, share=self._share)


class FeaturesTask:
    """Rows of features: svmlight, CSV, TSV, Parquet, .npz, .npy. The model is linear unless it has hidden layers."""

    kind = "features"
    source_fields: tuple[str, ...] = ("held_out", "format", "label", "labels")
    settings_fields: tuple[str, ...] = ("hidden_layers", "rank")
    defaults = Settings(
        epochs=10,
        batch_size=256,
        optimizer="adagrad",
        learning_rate=0.1,
        encoder_learning_rate=0.001,
        decay=False,
        hidden_layers=(),
        at=(5,),
    )
    metrics: tuple[str, ...] = ("accuracy", "accuracy@")
    best_by = "loss"
    allows_seen: bool | None = None
    by_line = False

    def read(
        self,
        source: Source,
        settings: Settings,
        folder: Path,
        progress: ReadProgress | None = None,
        share: Share = WHOLE,
    ) -> TrainingData:
        """Spool the rows into the folder."""
        reader = open_rows(
            source.data, format=source.format, label=source.label, labels=source.labels, progress=progress
        )
        names = Names()
        rows = spool(reader, folder / "train", names=names, progress=progress)
        summary = [f"{source.data.name}: {len(rows):,} rows of {rows.num_features:,} features, {len(names):,} classes"]
        if source.held_out is None:
            order = np.random.default_rng(settings.seed).permutation(_known(rows, len(names)))
            if len(order) < 2:
                raise UserError(f"`data` must hold 2 rows with labels, one to hold out, got 1 in {source.data}")
            cut = max(1, len(order) // HELD_OUT_ONE_IN)
            held_out_rows, held_out, chosen = rows, np.sort(order[:cut]), np.sort(order[cut:])
            summary.append(f"one row in {HELD_OUT_ONE_IN} is held out")
        else:
            other = open_rows(
                source.held_out, format=source.format, schema=reader.schema, name="held-out", progress=progress
            )
            all_names = Names(names)
            held_out_rows = spool(other, folder / "held_out", names=all_names, progress=progress, name="held-out")
            held_out, chosen = _known(held_out_rows, len(names)), np.arange(len(rows))
            if not len(held_out):
                raise UserError(f"`held-out` must hold labels that are trained on, got none in {source.held_out}")
            summary.append(f"{source.held_out.name}: {len(held_out_rows):,} rows held out")
            if len(held_out) < len(held_out_rows):
                summary[-1] += f", {len(held_out_rows) - len(held_out):,} left out for labels that are not trained on"
        train = RowBatches(rows, settings.batch_size or 1, seed=settings.seed, chosen=chosen, share=share)
        counts = torch.from_numpy(class_counts(train.targets, len(names))).double()
        spec = ModelSpec(self, names, counts, {"schema": reader.schema.packed()}, settings)

        def batches(limit: int | None) -> RowBatches:
            some = held_out if limit is None else held_out[:: max(1, -(-len(held_out) // limit))]
            return RowBatches(held_out_rows, EVALUATION_ROWS, chosen=some, share=share)

        return TrainingData(spec, train, batches, summary)

    def build(self, spec: ModelSpec) -> EncoderSpec:
        """Build a `FeatureEncoder`."""
        schema, settings = Schema.from_json(spec.config["schema"]), spec.settings
        encoder = FeatureEncoder(
            schema.num_features, sparse=schema.sparse, rank=settings.rank, hidden_layers=settings.hidden_layers or ()
        )
        return EncoderSpec(encoder, encoder.dim)

    def evaluation_batches(
        self, spec: ModelSpec, source: Source, share: Share = WHOLE
    ) -> tuple[Iterable[object], Sequence[str]]:
        """Return batches of labelled rows."""
        reader = _reader(spec, source)
        if not reader.labelled:
            raise UserError(f"`data` must have labels to evaluate on, got none in {source.data}")
        return LabelledChunks(reader, spec.names, share), (f"{source.data.name}",)

    def predict_batches(self, spec: ModelSpec, source: Source, *, size: int, seen: bool) -> Iterator[PredictBatch]:
        """Iterate over rows, shown by their number."""
        number = 0
        for chunk in _reader(spec, source, labelled=False).chunks():
            for first in range(0, len(chunk), size):
                part: Any = chunk.features[first : first + size]
                yield PredictBatch([str(number + i) for i in range(part.shape[0])], as_inputs(part))
                number += part.shape[0]


def _reader(spec: ModelSpec, source: Source, *, labelled: bool = True) -> "Reader":
    schema = Schema.from_json(spec.config["schema"])
    return open_rows(
        source.data, format=source.format, label=source.label, labels=source.labels, schema=schema, labelled=labelled
    )


def _numbered(chunk: Chunk, names: Names) -> tuple[Rows, "np.ndarray[Any, Any]"]:
    """Return the rows of a chunk, and the indices of those whose labels are all known."""
    labels = chunk.labels or []
    ids = names.find(label for row in labels for label in row)
    starts = np.concatenate([[0], np.cumsum([len(row) for row in labels])]).astype(np.int64)
    rows = Rows(chunk.features, np.where(ids < 0, len(names), ids), starts)
    return rows, _known(rows, len(names))


def _known(rows: Rows, num_classes: int) -> "np.ndarray[Any, Any]":
    """Return the indices of the rows that have labels, all below C."""
    foreign = np.asarray(rows.labels) >= num_classes
    if rows.starts is None:
        return np.flatnonzero(~foreign)
    before = np.concatenate([[0], np.cumsum(foreign)])
    number = np.diff(rows.starts)
    return np.flatnonzero((number > 0) & (before[rows.starts[1:]] == before[rows.starts[:-1]]))
