"""Text: the next token is the class."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.data import WHOLE, Names, Share, read_text
from manyclass.data.files import line_batches, lines
from manyclass.data.text import END, SPLITS, UNKNOWN, Text
from manyclass.defaults import IGNORE_INDEX
from manyclass.encoders import Recurrent
from manyclass.errors import UserError
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import EncoderSpec, ModelSpec, PredictBatch, ReadProgress, Source, TrainingData

CONTEXT_TOKENS = 64  # read by an evaluation before the tokens that it predicts
EVALUATION_WINDOWS = 256  # per batch
# Adagrad: Adam moves a row by its learning rate at each draw, whatever the number of classes that it stands for.
RECURRENT = Settings(optimizer="adagrad", clip=1.0, decay=True, dim=256, layers=1, tied=True)


class Segments:
    """Batches of pieces [B, T] of a text and the tokens that follow; each epoch starts at another offset.

    A process takes its share of each batch. No state of the encoder goes from one piece to the next.
    """

    def __init__(self, ids: Tensor, size: int, length: int, *, seed: int, share: Share = WHOLE) -> None:
        # A short text gives one or two pieces.
        self._ids, self._size, self._length = ids, size, min(length, max(1, (len(ids) - 1) // 2))
        self._seed, self._epoch, self._share = seed, 0, share

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides offset and order."""
        self._epoch = epoch

    def __len__(self) -> int:
        # One piece less than fits, because the offset moves.
        return math.ceil(self._pieces / self._size)

    @property
    def _pieces(self) -> int:
        return max(1, (len(self._ids) - 1) // self._length - 1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        spare = len(self._ids) - 1 - self._pieces * self._length
        first = int(torch.randint(spare + 1, (), generator=generator))
        place = torch.arange(self._length + 1)
        for part in torch.randperm(self._pieces, generator=generator).split(self._size):
            piece = self._ids[(first + self._share.of(part) * self._length).unsqueeze(1) + place]
            yield piece[:, :-1], self._share.targets(piece[:, 1:].contiguous(), size=len(part))


class ContextWindows:
    """Batches that go through a text once and predict each token from at least 64 tokens before it.

    Args:
        ids: ids of the text; the first is not predicted.
        start: id that pads the context before the text.
        limit: predict at most this many tokens, in windows spread over the text. None: all.
        share: the part of each batch to give. Default: all of it.
    """

    def __init__(self, ids: Tensor, *, start: int, limit: int | None = None, share: Share = WHOLE) -> None:
        self._ids, self._start, self._share = ids, start, share
        self._firsts = torch.arange(0, len(ids) - 1, CONTEXT_TOKENS)
        if limit is not None and limit < len(ids) - 1:
            self._firsts = self._firsts[:: math.ceil(len(self._firsts) / max(1, limit // CONTEXT_TOKENS))]

    def __len__(self) -> int:
        return math.ceil(len(self._firsts) / EVALUATION_WINDOWS)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        n = len(self._ids)
        for part in self._firsts.split(EVALUATION_WINDOWS):
            place = self._share.of(part).unsqueeze(1) + torch.arange(-CONTEXT_TOKENS, CONTEXT_TOKENS + 1)
            piece = self._ids[place.clamp(0, n - 1)].masked_fill_(place < 0, self._start)
            target = piece[:, CONTEXT_TOKENS + 1 :].masked_fill(place[:, CONTEXT_TOKENS + 1 :] >= n, IGNORE_INDEX)
            yield {"ids": piece[:, :-1], "skip": CONTEXT_TOKENS}, self._share.targets(target, size=len(part))


class TextTask:
    """Plain text, split at spaces or into words: a class is a token, an example is the tokens before it."""

    kind = "text"
    source_fields: tuple[str, ...] = ("held_out", "split", "min_count")
    settings_fields: tuple[str, ...] = ("dim", "layers", "dropout", "length", "tied")
    defaults = replace(
        RECURRENT,
        epochs=10,
        batch_size=32,
        learning_rate=0.2,
        encoder_learning_rate=0.004,
        dropout=0.3,
        length=70,
        at=(10,),
    )
    metrics: tuple[str, ...] = ("accuracy", "accuracy@")
    best_by = "loss"
    allows_seen: bool | None = None
    by_line = True

    def read(
        self,
        source: Source,
        settings: Settings,
        folder: Path,
        progress: ReadProgress | None = None,
        share: Share = WHOLE,
    ) -> TrainingData:
        """Read the text; its ids go into the folder."""
        split, min_count = source.split or "spaces", source.min_count or 1
        text = read_text(
            source.data, held_out=source.held_out, split=split, min_count=min_count, folder=folder, progress=progress
        )
        return self.training_data(text, settings, {"split": split}, share)

    def training_data(
        self, text: Text, settings: Settings, config: dict[str, Any], share: Share = WHOLE
    ) -> TrainingData:
        """Return the training data of a text that has been read."""
        names = Names(text.vocabulary)
        counts = torch.bincount(text.train, minlength=len(names)).double()
        spec = ModelSpec(self, names, counts, config, settings)
        start = _start(names)
        unigram = math.exp(-_log_frequency(counts)[text.held_out[1:]].mean().item())
        return TrainingData(
            spec,
            Segments(text.train, settings.batch_size or 1, settings.length or 1, seed=settings.seed, share=share),
            lambda limit: ContextWindows(text.held_out, start=start, limit=limit, share=share),
            (
                f"{text.source}: {len(text.train):,} tokens to train on, {len(text.held_out):,} held out, "
                f"{len(names):,} classes",
                f"held-out perplexity of frequencies alone {unigram:,.1f}",
            ),
        )

    def build(self, spec: ModelSpec) -> EncoderSpec:
        """Build an LSTM."""
        _check.choice("split", spec.config["split"], tuple(SPLITS))
        return recurrent(spec)

    def evaluation_batches(
        self, spec: ModelSpec, source: Source, share: Share = WHOLE
    ) -> tuple[Iterable[object], Sequence[str]]:
        """Return windows over all of the text."""
        ids, unknown = _number(spec, source.data)
        if len(ids) < 2:
            raise UserError(f"`data` must hold at least 2 tokens that the model knows, got {len(ids)} in {source.data}")
        summary = f"{source.data.name}: {len(ids):,} tokens"
        if unknown:
            treatment = "count as <unk>" if spec.names.ids(UNKNOWN) is not None else "are left out"
            summary += f", and {unknown:,} that the model does not know {treatment}"
        return ContextWindows(ids, start=_start(spec.names), share=share), (summary,)

    def predict_batches(self, spec: ModelSpec, source: Source, *, size: int, seen: bool) -> Iterator[PredictBatch]:
        """Iterate over lines, whose next token is to be predicted."""
        split, start = SPLITS[spec.config["split"]], _start(spec.names)
        for batch in line_batches(source.data, size):
            known = [(line, [i for i in _ids(spec.names, split(line)) if i >= 0]) for _, line in batch]
            yield _predict_batch([(line, [start, *ids][-4 * CONTEXT_TOKENS :]) for line, ids in known])


def recurrent(spec: ModelSpec) -> EncoderSpec:
    """Build an LSTM whose inputs are classes, tied to the head or not."""
    settings = spec.settings
    dim = settings.dim or 1
    embedding = nn.Embedding(len(spec.names), dim, sparse=True)
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    encoder = Recurrent(embedding, layers=settings.layers or 1, dropout=settings.dropout or 0.0)
    return EncoderSpec(encoder, dim, embedding if settings.tied else None)


def _start(names: Names) -> int:
    """Return the id that pads the context before a text: the end-of-line token if there is one, else 0."""
    return names.ids(END) or 0


def _ids(names: Names, tokens: Iterable[str]) -> list[int]:
    """Return the ids of tokens; for an unknown token that of <unk>, or -1 if there is no such class."""
    unknown = names.ids(UNKNOWN)
    other = -1 if unknown is None else unknown
    return [other if (found := names.ids(token)) is None else found for token in tokens]


def _number(spec: ModelSpec, path: Path) -> tuple[Tensor, int]:
    """Return the ids of a text, and the number of tokens that the model does not know."""
    split, names = SPLITS[spec.config["split"]], spec.names
    ids = array("q")
    unknown = 0
    for line in lines(path):
        tokens = [*split(line), END]
        unknown += sum(names.ids(token) is None for token in tokens)
        ids.extend(i for i in _ids(names, tokens) if i >= 0)
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64), unknown


def _predict_batch(held: Sequence[tuple[str, Sequence[int]]]) -> PredictBatch:
    length = max(len(ids) for _, ids in held)
    rows = torch.tensor([[*ids, *[0] * (length - len(ids))] for _, ids in held])
    last = torch.tensor([len(ids) - 1 for _, ids in held])
    return PredictBatch([line for line, _ in held], {"ids": rows, "last": last})


def _log_frequency(counts: Tensor) -> Tensor:
    counts = counts.clamp(min=1)
    return (counts / counts.sum()).log()
