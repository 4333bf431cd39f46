"""The model that the designs are compared on: the last five tokens, one layer, the next token."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyclass.counts import ClassCounts
from manyclass.data import Text
from manyclass.heads import ClassHead
from manyclass.lab.softmax import ExactSoftmax
from manyclass.lab.study.designs import DESIGNS
from manyclass.optim import RowAdagrad
from manyclass.samplers import Systematic
from manyclass.training import Callback, HeldOut, Record, Training

CONTEXT, WORD_DIM, DIM, BATCH = 5, 64, 128, 512
DROPOUT = 0.3  # without it the third epoch is the last that helps, whoever trains


class Windows:
    """Batches of contexts [B, 5] and the tokens that follow, in an order that follows from seed and epoch."""

    def __init__(self, ids: Tensor, *, batch: int = BATCH, seed: int | None = None) -> None:
        self._rows, self._batch, self._seed = ids.unfold(0, CONTEXT + 1, 1), batch, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        n = len(self._rows)
        if self._seed is None:
            order = torch.arange(n)
        else:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(1000 * self._seed + self._epoch))
        for part in order.to(self._rows.device).split(self._batch):
            rows = self._rows.index_select(0, part)
            yield rows[:, :-1], rows[:, -1].contiguous()


class Encoder(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_classes, WORD_DIM, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        self.mix = nn.Linear(CONTEXT * WORD_DIM, DIM)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, context: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(torch.tanh(self.mix(self.words(context).flatten(1))))
        return hidden


@dataclass(frozen=True)
class Trained:
    """A training: its evaluations, and the parts that it trained."""

    points: tuple[Record, ...]
    encoder: Encoder
    head: ClassHead


def curve(points: tuple[Record, ...]) -> dict[str, Any]:
    """Evaluations as lists, for a cell."""
    return {
        "step": [point.step for point in points],
        "examples": [point.examples for point in points],
        "train_seconds": [point.seconds for point in points],
        "loss": [point.held_out_loss for point in points],
    }


def save(text: Text, path: Path) -> None:
    torch.save({"train": text.train.int(), "held_out": text.held_out.int(), "num_classes": text.num_classes}, path)


@functools.cache
def load(path: Path, device: str) -> tuple[Tensor, Tensor, int]:
    """The tokens to train on, those held out, and the number of classes."""
    found = torch.load(path, weights_only=True)
    return found["train"].long().to(device), found["held_out"].long().to(device), found["num_classes"]


def counts_of(train: Tensor, num_classes: int) -> ClassCounts:
    return ClassCounts.from_targets(train.cpu(), num_classes)


def new_model(train: Tensor, num_classes: int, *, seed: int) -> tuple[Encoder, ClassHead]:
    """First parameters, the same for every design."""
    torch.manual_seed(seed)
    encoder = Encoder(num_classes).to(train.device)
    counts = counts_of(train, num_classes)
    head = ClassHead(DIM, num_classes, counts=counts, sampler=Systematic(counts, 1), sparse=True).to(train.device)
    return encoder, head


def train_model(
    train: Tensor,
    held_out: Tensor,
    num_classes: int,
    *,
    design: str | None,
    k: int,
    rate: float,
    seed: int,
    epochs: int,
    part: Tensor | None = None,
    points: int = 4,
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Train with a design, or exactly where it is None; everything else is the same.

    Args:
        train, held_out, num_classes: the text.
        design, k, rate, seed, epochs: how to train.
        part: tokens to train on, where that is not all of `train`, which the counts are of.
        points: evaluations in an epoch.
        callbacks: of the training.
    """
    encoder, head = new_model(train, num_classes, seed=seed)
    exact = design is None
    if design is not None:
        head.use(DESIGNS[design](counts_of(train, num_classes), k))
    learner = ExactSoftmax(head.to_linear()) if exact else head
    # Input words have row gradients on both sides; the exact head has torch's own Adagrad.
    by_row = [encoder.words.weight, *([] if exact else head.parameters())]
    dense = [*encoder.mix.parameters(), *(head.parameters() if exact else [])]
    batches = Windows(train if part is None else part, seed=seed)
    history = Training(
        learner,
        batches,
        [torch.optim.Adagrad(dense, lr=rate), RowAdagrad(by_row, lr=rate)],
        encoder=encoder,
        epochs=epochs,
        held_out=HeldOut(Windows(held_out, batch=2048), every=max(1, len(batches) // points)),
        callbacks=callbacks,
        seed=seed,
    ).run()
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    return Trained(tuple(record for record in history.records if record.held_out_loss is not None), encoder, head)
