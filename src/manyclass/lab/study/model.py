"""The model that designs are compared on: it predicts the next token from the last five, with one hidden layer."""

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
from manyclass.storage import atomic_write
from manyclass.training import Callback, HeldOut, Record, Training

CONTEXT, WORD_DIM, DIM, BATCH_SIZE = 5, 64, 128, 512
DROPOUT = 0.3  # without it no training improves after the third epoch


class ContextBatches:
    """Batches of contexts [B, 5] and next tokens [B], shuffled by seed and epoch, or in order if seed is None."""

    def __init__(self, ids: Tensor, *, batch: int = BATCH_SIZE, seed: int | None = None) -> None:
        self._rows, self._batch, self._seed = ids.unfold(0, CONTEXT + 1, 1), batch, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle for this epoch."""
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
    """Embeddings of five tokens, concatenated, and one tanh layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_classes, WORD_DIM, sparse=True)
        nn.init.normal_(self.words.weight, std=0.1)
        self.mix = nn.Linear(CONTEXT * WORD_DIM, DIM)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, context: Tensor) -> Tensor:
        """Encode contexts [B, 5] as [B, DIM]."""
        hidden: Tensor = self.dropout(torch.tanh(self.mix(self.words(context).flatten(1))))
        return hidden


@dataclass(frozen=True)
class Trained:
    """Evaluations of a training, and the modules that it trained."""

    points: tuple[Record, ...]
    encoder: Encoder
    head: ClassHead


def loss_columns(points: tuple[Record, ...]) -> dict[str, Any]:
    """Return evaluations as JSON-serialisable columns."""
    return {
        "step": [point.step for point in points],
        "examples": [point.examples for point in points],
        "train_seconds": [point.seconds for point in points],
        "loss": [point.held_out_loss for point in points],
    }


def save_text(text: Text, path: Path) -> None:
    """Save a text's token ids for worker processes."""
    kept = {"train": text.train.int(), "held_out": text.held_out.int(), "num_classes": text.num_classes}
    with atomic_write(path) as temporary:
        torch.save(kept, temporary)


@functools.cache
def load_text(path: Path, device: str) -> tuple[Tensor, Tensor, int]:
    """Load the training tokens, the held-out tokens and the number of classes."""
    found = torch.load(path, weights_only=True)
    return found["train"].long().to(device), found["held_out"].long().to(device), found["num_classes"]


def class_counts(train: Tensor, num_classes: int) -> ClassCounts:
    """Count the classes of the training tokens."""
    return ClassCounts.from_targets(train.cpu(), num_classes)


def build_model(train: Tensor, num_classes: int, *, seed: int) -> tuple[Encoder, ClassHead]:
    """Build encoder and head with initial parameters that are the same for every design."""
    torch.manual_seed(seed)
    encoder = Encoder(num_classes).to(train.device)
    counts = class_counts(train, num_classes)
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
    """Train with a design and k, or exactly if `design` is None; everything else is the same.

    Training uses the tokens `part` if given, else `train`; class counts are always those of `train`. The exact
    held-out loss is evaluated `points` times per epoch.
    """
    encoder, head = build_model(train, num_classes, seed=seed)
    exact = design is None
    if design is not None:
        head.use(DESIGNS[design](class_counts(train, num_classes), k))
    learner = ExactSoftmax(head.to_linear()) if exact else head
    # Input embeddings have row gradients in both cases; the exact head uses torch's Adagrad.
    by_row = [encoder.words.weight, *([] if exact else head.parameters())]
    dense = [*encoder.mix.parameters(), *(head.parameters() if exact else [])]
    batches = ContextBatches(train if part is None else part, seed=seed)
    history = Training(
        learner,
        batches,
        [torch.optim.Adagrad(dense, lr=rate), RowAdagrad(by_row, lr=rate)],
        encoder=encoder,
        epochs=epochs,
        held_out=HeldOut(ContextBatches(held_out, batch=2048), every=max(1, len(batches) // points)),
        callbacks=callbacks,
        seed=seed,
    ).run()
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    return Trained(tuple(record for record in history.records if record.held_out_loss is not None), encoder, head)
