"""Sequences of items: the next item of a user is the class."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from manyclass.data import LastBatches, SequenceBatches, Sequences, read_sequences
from manyclass.errors import Notice, UserError
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import EncoderSpec, ModelSpec, PredictBatch, ReadProgress, Source, TrainingData
from manyclass.tasks.text import RECURRENT, recurrent

EVALUATION_USERS = 512  # per batch


class LastItems:
    """Batches of users: the target is their last item, the input is the items before."""

    def __init__(self, batches: LastBatches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for ids, lengths, target, _ in self._batches:
            yield {"ids": ids, "last": lengths - 1}, target


class SequencesTask:
    """Interactions, `user item` a line in time order; the last item of each user is for testing."""

    kind = "sequences"
    source_fields: tuple[str, ...] = ()
    settings_fields: tuple[str, ...] = ("dim", "layers", "dropout", "length", "tied")
    # Most items have few interactions; with less dropout, ranks and probabilities are worse.
    defaults = replace(
        RECURRENT, epochs=30, batch_size=256, learning_rate=0.02, encoder_learning_rate=0.001, dropout=0.7, length=50
    )
    metrics: tuple[str, ...] = ("HR@10", "NDCG@10")
    best_by = "NDCG@10"
    allows_seen: bool | None = False
    by_line = False

    def read(
        self, source: Source, settings: Settings, folder: Path, progress: ReadProgress | None = None
    ) -> TrainingData:
        """Read the interactions; the last item but one of each user is held out."""
        sequences = read_sequences(source.data, progress=progress)
        length = settings.length or 1
        valid = sequences.last_batches("valid", EVALUATION_USERS, length=length, seen=False)
        train = SequenceBatches(sequences, settings.batch_size or 1, length=length, seed=settings.seed)
        if not len(valid) or not len(train):
            raise UserError(
                f"`data` must hold a user of 4 items, the last two of which are held out, got none in {source.data}"
            )
        return TrainingData(
            ModelSpec(self, sequences.item_names, sequences.counts().double(), {}, settings),
            train,
            lambda limit: LastItems(
                sequences.last_batches("valid", EVALUATION_USERS, length=length, seen=False, limit=limit)
            ),
            (
                f"{source.data.name}: {len(sequences.items):,} interactions of {sequences.num_users:,} users with "
                f"{sequences.num_items:,} items",
                f"held out: the last item but one of {len(valid.users):,} users; the last is left for `evaluate`",
            ),
        )

    def build(self, spec: ModelSpec) -> EncoderSpec:
        """Build an LSTM."""
        return recurrent(spec)

    def evaluation_batches(self, spec: ModelSpec, source: Source) -> tuple[Iterable[object], Sequence[str]]:
        """Return batches whose targets are the last items of users."""
        sequences = _read(spec, source)
        last = sequences.last_batches("test", EVALUATION_USERS, length=spec.settings.length or 1, seen=False)
        if not len(last.users):
            raise UserError(f"`data` must hold a user of 3 items, the last one known, got none in {source.data}")
        summary = (
            f"{source.data.name}: the last item of {len(last.users):,} users, ranked among all {len(spec.names):,}"
        )
        return LastItems(last), (summary, *_unknown(sequences))

    def predict_batches(self, spec: ModelSpec, source: Source, *, size: int, seen: bool) -> Iterator[PredictBatch]:
        """Iterate over users, whose next item is to be predicted."""
        sequences = read_sequences(source.data, item_names=spec.names, until_fault=True)
        after = sequences.last_batches("next", size, length=spec.settings.length or 1, seen=seen)
        if sequences.unknown:
            dropped = sequences.num_users - len(after.users)
            also = f", and {dropped:,} users without other items" if dropped else ""
            message = f"left out: {sequences.unknown:,} lines of items that the model does not know{also}"
            warnings.warn(message, Notice, stacklevel=2)
        for users, (ids, lengths, _, items) in zip(after.users.split(size), after, strict=True):
            shown = [sequences.user_names[user] for user in users.tolist()]
            yield PredictBatch(shown, {"ids": ids, "last": lengths - 1}, items)
        if sequences.fault is not None:
            raise sequences.fault


def _read(spec: ModelSpec, source: Source) -> Sequences:
    return read_sequences(source.data, item_names=spec.names)


def _unknown(sequences: Sequences) -> list[str]:
    if not sequences.unknown:
        return []
    users = 0 if sequences.last_unknown is None else int(sequences.last_unknown.sum())
    summary = f"left out: {sequences.unknown:,} lines of items that the model does not know"
    return [f"{summary}, and {users:,} users whose last line is one" if users else summary]
