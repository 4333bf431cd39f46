"""The next token of a text."""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.data import Names, read_text
from manyclass.data.files import line_batches, lines
from manyclass.data.text import END, SPLITS, UNKNOWN, Text
from manyclass.defaults import IGNORE_INDEX
from manyclass.encoders import Recurrent
from manyclass.errors import UserError
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import EncoderSpec, ModelSpec, PredictBatch, ReadProgress, Source, TrainingData

_SCENE = 64  # tokens that an evaluation reads before those it counts
_EVALUATED = 256  # pieces of an evaluation at once


class Segments:
    """Batches of pieces [B, T] of a text and the tokens that follow; an epoch begins somewhere else each time."""

    def __init__(self, ids: Tensor, size: int, length: int, *, seed: int) -> None:
        # A short text is one piece, or two.
        self._ids, self._size, self._length = ids, size, min(length, max(1, (len(ids) - 1) // 2))
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        # One piece less than would fit: the beginning moves.
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
            piece = self._ids[(first + part * self._length).unsqueeze(1) + place]
            yield piece[:, :-1], piece[:, 1:].contiguous()


class ContextWindows:
    """Batches that go through a text once: each token is predicted from those before it, 64 of them or more.

    Args:
        ids: of the text; the first is not predicted.
        start: the id that stands before the text.
        limit: how many tokens to predict, in pieces from everywhere. None: all.
    """

    def __init__(self, ids: Tensor, *, start: int, limit: int | None = None) -> None:
        self._ids, self._start = ids, start
        self._firsts = torch.arange(0, len(ids) - 1, _SCENE)
        if limit is not None and limit < len(ids) - 1:
            self._firsts = self._firsts[:: math.ceil(len(self._firsts) / max(1, limit // _SCENE))]

    def __len__(self) -> int:
        return math.ceil(len(self._firsts) / _EVALUATED)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        n = len(self._ids)
        for part in self._firsts.split(_EVALUATED):
            place = part.unsqueeze(1) + torch.arange(-_SCENE, _SCENE + 1)
            piece = self._ids[place.clamp(0, n - 1)].masked_fill_(place < 0, self._start)
            target = piece[:, _SCENE + 1 :].masked_fill(place[:, _SCENE + 1 :] >= n, IGNORE_INDEX)
            yield {"ids": piece[:, :-1], "skip": _SCENE}, target


class TextTask:
    """Plain text: tokens between spaces, or words; a class is a token, an example is what stands before it."""

    kind = "text"
    source_fields = ("held_out", "split", "min_count")
    settings_fields = ("dim", "layers", "dropout", "length", "tied")
    defaults = Settings(
        epochs=10,
        batch_size=32,
        optimizer="adam",
        learning_rate=0.004,
        encoder_learning_rate=0.004,
        clip=1.0,
        decay=True,
        dim=256,
        layers=1,
        dropout=0.3,
        length=70,
        tied=True,
    )
    metrics = ("accuracy", "accuracy@10")
    best_by = "loss"
    allows_seen = None
    by_line = True

    def read(self, source: Source, settings: Settings, folder: Path, watch: ReadProgress | None = None) -> TrainingData:
        split, min_count = source.split or "spaces", source.min_count or 1
        text = read_text(
            source.data, held_out=source.held_out, split=split, min_count=min_count, folder=folder, progress=watch
        )
        return self.training_data(text, settings, {"split": split})

    def training_data(self, text: Text, settings: Settings, config: dict[str, Any]) -> TrainingData:
        """The task of a text that is read already."""
        names = Names(text.vocabulary)
        counts = torch.bincount(text.train, minlength=len(names)).double()
        spec = ModelSpec(self, names, counts, config, settings)
        start = _start(names)
        unigram = math.exp(-_log_frequency(counts)[text.held_out[1:]].mean().item())
        return TrainingData(
            spec,
            Segments(text.train, settings.batch_size or 1, settings.length or 1, seed=settings.seed),
            lambda limit: ContextWindows(text.held_out, start=start, limit=limit),
            (
                f"{text.source}: {len(text.train):,} tokens to train on, {len(text.held_out):,} held out, "
                f"{len(names):,} classes",
                f"held-out perplexity of frequencies alone {unigram:,.1f}",
            ),
        )

    def build(self, spec: ModelSpec) -> EncoderSpec:
        _check.choice("split", spec.config["split"], tuple(SPLITS))
        return recurrent(spec)

    def evaluation_batches(self, spec: ModelSpec, source: Source) -> tuple[Iterable[object], Sequence[str]]:
        ids, unknown = _number(spec, source.data)
        if len(ids) < 2:
            raise UserError(f"`data` must hold at least 2 tokens that the model knows, got {len(ids)} in {source.data}")
        about = f"{source.data.name}: {len(ids):,} tokens"
        if unknown:
            what = "count as <unk>" if spec.names.ids(UNKNOWN) is not None else "are left out"
            about += f", and {unknown:,} that the model does not know {what}"
        return ContextWindows(ids, start=_start(spec.names)), (about,)

    def predict_batches(
        self, spec: ModelSpec, source: Source, *, size: int, with_seen: bool = True
    ) -> Iterator[PredictBatch]:
        split, start = SPLITS[spec.config["split"]], _start(spec.names)
        for batch in line_batches(source.data, size):
            known = [(line, [i for i in _ids(spec.names, split(line)) if i >= 0]) for _, line in batch]
            yield _asked([(line, [start, *ids][-4 * _SCENE :]) for line, ids in known])


def recurrent(spec: ModelSpec) -> EncoderSpec:
    """An LSTM over the classes themselves, tied to the head or not."""
    settings = spec.settings
    dim = settings.dim or 1
    embedding = nn.Embedding(len(spec.names), dim, sparse=True)
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    encoder = Recurrent(embedding, layers=settings.layers or 1, dropout=settings.dropout or 0.0)
    return EncoderSpec(encoder, dim, embedding if settings.tied else None)


def _start(names: Names) -> int:
    """What stands before a text: the end of a line, where lines have one."""
    return names.ids(END) or 0


def _ids(names: Names, tokens: Iterable[str]) -> list[int]:
    """-1 for those that are no class, where there is none for them."""
    unknown = names.ids(UNKNOWN)
    other = -1 if unknown is None else unknown
    return [other if (found := names.ids(token)) is None else found for token in tokens]


def _number(spec: ModelSpec, path: Path) -> tuple[Tensor, int]:
    """The ids of a text, and how many of its tokens the model does not know."""
    split, names = SPLITS[spec.config["split"]], spec.names
    ids = array("q")
    unknown = 0
    for line in lines(path):
        tokens = [*split(line), END]
        unknown += sum(names.ids(token) is None for token in tokens)
        ids.extend(i for i in _ids(names, tokens) if i >= 0)
    # Torch takes no buffer of nothing.
    return torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64), unknown


def _asked(held: Sequence[tuple[str, Sequence[int]]]) -> PredictBatch:
    length = max(len(ids) for _, ids in held)
    rows = torch.tensor([[*ids, *[0] * (length - len(ids))] for _, ids in held])
    last = torch.tensor([len(ids) - 1 for _, ids in held])
    return PredictBatch([line for line, _ in held], {"ids": rows, "last": last})


def _log_frequency(counts: Tensor) -> Tensor:
    counts = counts.clamp(min=1)
    return (counts / counts.sum()).log()
