"""Sequences of items: the next item of a user is the class."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyclass.data import WHOLE, LastBatches, SequenceBatches, Sequences, Share, read_sequences
from manyclass.data.files import in_folder
from manyclass.defaults import IGNORE_INDEX
from manyclass.errors import UserError, notify
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import EncoderSpec, ModelSpec, PredictBatch, ReadProgress, Source, TrainingData
from manyclass.tasks.text import RECURRENT, recurrent

EVALUATION_USERS = 512  # per batch


class Steps:
    """Batches to train on: the items of users, and the item after each; nothing comes after padding.

    A user with many items makes a batch long, and most of it padding: a head that scored that too would take several
    times as long, and a sampler would take it for examples.
    """

    def __init__(self, batches: SequenceBatches) -> None:
        self._batches = batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self._batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for ids, target in self._batches:
            present = target != IGNORE_INDEX
            if not present.any():
                # A process without an example of this batch; the encoder needs a position all the same.
                present[0, 0] = True
            places = present.flatten().nonzero().squeeze(1)
            yield {"ids": ids, "places": places, "lengths": present.sum(1).tolist()}, target.flatten()[places]


class LastItems:
    """Batches of users: the target is their last item, the input is the items before."""

    def __init__(self, batches: LastBatches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for ids, lengths, target, _ in self._batches:
            yield {"ids": ids, "last": lengths - 1, "lengths": lengths.tolist()}, target


class SequencesTask:
    """Interactions, `user item` a line in time order; a user may be a session. The last items are for testing."""

    kind = "sequences"
    source_fields: tuple[str, ...] = ("held_out",)
    settings_fields: tuple[str, ...] = ("dim", "layers", "dropout", "length", "tied")
    # Most items have few interactions; with less dropout, ranks and probabilities are worse.
    defaults = replace(
        RECURRENT,
        epochs=30,
        batch_size=256,
        learning_rate=0.2,
        encoder_learning_rate=0.001,
        dropout=0.7,
        length=50,
        at=(10,),
    )
    metrics: tuple[str, ...] = ("HR@", "NDCG@", "MRR@", "MRR")
    best_by = "NDCG@"
    allows_seen: bool | None = False
    by_line = False

    def read(
        self,
        source: Source,
        settings: Settings,
        folder: Path,
        progress: ReadProgress | None = None,
        share: Share = WHOLE,
    ) -> TrainingData:
        """Read the interactions; without a held-out file, the last item but one of each user is held out."""
        path, other = source.data, source.held_out
        if path.is_dir():
            path, other = in_folder(path, ("train",)), other or in_folder(path, ("valid", "test"))
        sequences = replace(read_sequences(path, progress=progress), held_back=other is None)
        names, length = sequences.item_names, settings.length or 1
        batches = SequenceBatches(sequences, settings.batch_size or 1, length=length, seed=settings.seed, share=share)
        train = Steps(batches)
        held_out, split = sequences, "valid"
        if other is not None:
            read = read_sequences(other, item_names=names, name="held-out", progress=progress)
            held_out, split = replace(read, held_back=False), "test"
        users = len(_last(held_out, split, length).users)
        if other is None:
            if not len(train) or not users:
                raise UserError(
                    f"`data` must hold a user of 4 items, the last two of which are held out, got none in {path}"
                )
            about = [f"held out: the last item but one of {users:,} users; the last is left for `evaluate`"]
        else:
            if not len(train):
                raise UserError(f"`data` must hold a user of 2 items to train on, got none in {path}")
            _check_users(users, held_out, other, "held-out")
            about = [f"held out: the last item of {users:,} users of {other.name}", *_left_out(held_out)]
        summary = f"{len(sequences.items):,} interactions of {sequences.num_users:,} users with {len(names):,} items"
        config = {"data": sequences.digest(), "held_back": sequences.held_back}
        return TrainingData(
            ModelSpec(self, names, sequences.counts().double(), config, settings),
            train,
            lambda limit: LastItems(_last(held_out, split, length, limit, share)),
            (f"{path.name}: {summary}", *about),
        )

    def build(self, spec: ModelSpec) -> EncoderSpec:
        """Build an LSTM."""
        return recurrent(spec)

    def evaluation_batches(
        self, spec: ModelSpec, source: Source, share: Share = WHOLE
    ) -> tuple[Iterable[object], Sequence[str]]:
        """Return batches whose targets are the last items of users; of a folder, of its test file."""
        path = in_folder(source.data, ("test", "valid")) if source.data.is_dir() else source.data
        sequences = read_sequences(path, item_names=spec.names)
        trained_on = sequences.digest() == spec.config.get("data")
        sequences = replace(sequences, held_back=trained_on and spec.config.get("held_back") is True)
        last = _last(sequences, "test", spec.settings.length or 1, share=share)
        _check_users(len(last.users), sequences, path, "data")
        summary = [f"{path.name}: the last item of {len(last.users):,} users, ranked among all {len(spec.names):,}"]
        if trained_on and not sequences.held_back:
            summary.append("the model was trained on these items, so this is no test of it")
        return LastItems(last), (*summary, *_left_out(sequences))

    def predict_batches(self, spec: ModelSpec, source: Source, *, size: int, seen: bool) -> Iterator[PredictBatch]:
        """Iterate over users, whose next item is to be predicted."""
        sequences = read_sequences(source.data, item_names=spec.names, until_fault=True)
        after = sequences.last_batches("next", size, length=spec.settings.length or 1, seen=seen)
        if sequences.unknown:
            dropped = sequences.num_users - len(after.users)
            also = f", and {dropped:,} users without other items" if dropped else ""
            notify(f"left out: {sequences.unknown:,} lines of items that the model does not know{also}")
        for users, (ids, lengths, _, items) in zip(after.users.split(size), after, strict=True):
            shown = [sequences.user_names[user] for user in users.tolist()]
            yield PredictBatch(shown, {"ids": ids, "last": lengths - 1}, items)
        if sequences.fault is not None:
            raise sequences.fault


def _last(sequences: Sequences, split: str, length: int, limit: int | None = None, share: Share = WHOLE) -> LastBatches:
    return sequences.last_batches(split, EVALUATION_USERS, length=length, seen=False, limit=limit, share=share)


def _check_users(users: int, sequences: Sequences, path: Path, name: str) -> None:
    """Raise a UserError if a file has no user with a last item to predict."""
    if not users:
        wanted = f"a user of {3 if sequences.held_back else 2} items that the model knows, one of them the last"
        raise UserError(f"`{name}` must hold {wanted}, got none in {path}")


def _left_out(sequences: Sequences) -> list[str]:
    """Return a line that counts the users without a last item to predict, by reason, and the unknown items."""
    known = sequences.starts.diff()
    lost = torch.zeros_like(known) if sequences.left_out is None else sequences.left_out
    last = lost.bool() if sequences.last_unknown is None else sequences.last_unknown
    single = known + lost == 1
    reasons = {
        "with one item": single,
        "whose last item the model does not know": last & ~single,
        "with no item before the last that the model knows": (known == 1) & ~last & ~single,
        "with two items, which are trained on": (known == 2) & ~last & sequences.held_back,
    }
    found = [f"{int(users.sum()):,} users {reason}" for reason, users in reasons.items() if users.any()]
    counted = ~torch.stack(list(reasons.values())).any(0)
    if lines := int(lost[counted].sum()):
        found.append(f"of the others {lines:,} lines of items that the model does not know")
    return [f"left out: {', '.join(found)}"] if found else []
