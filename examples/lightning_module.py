"""Next-word prediction with PyTorch Lightning, on the source of Python's standard library.

    pip install "manyclass[lightning]"
    python examples/lightning_module.py
    python examples/lightning_module.py --folder run                         # save a checkpoint after each epoch
    python examples/lightning_module.py --folder run --resume --epochs 8     # go on from the last one
    python examples/lightning_module.py --accelerator cpu --devices 2 --precision bf16-mixed

A GRU reads 32 words and predicts the next one after each, among tens of thousands. A training step scores some of
them; the held-out loss is exact, over all. Comments number the four places that differ from a model with `nn.Linear`
and `nn.CrossEntropyLoss`.
"""

import argparse
from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from manyclass import ClassCounts, ClassHead, diagnose, optim
from manyclass.data import standard_library
from manyclass.integrations.lightning import SampledTraining

LENGTH, DIM, BATCH_SIZE = 32, 64, 64


class NextWord(L.LightningModule):
    """A language model whose output layer shares the vectors of its input words."""

    def __init__(self, counts: ClassCounts) -> None:
        super().__init__()
        # 1. With `sparse=True` a step updates only the rows of the words that it reads or scores.
        self.embedding = nn.Embedding(counts.num_classes, DIM, sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        # 2. The head stands for nn.Linear and nn.CrossEntropyLoss. `ClassHead(DIM, num_classes, ...)` is not tied.
        self.head = ClassHead.tied(self.embedding, counts=counts)

    def forward(self, words: Tensor) -> Tensor:
        """Encode words [B, T] as hidden vectors [B, T, D]."""
        hidden: Tensor = self.gru(self.embedding(words))[0]
        return hidden

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the sampled loss."""
        words, following = batch
        loss: Tensor = self.head(self(words), following)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the exact loss, by which models can be compared."""
        words, following = batch
        self.log("held_out", self.head.exact_loss(self(words), following), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimiser, made of one for rows of words and one for the rest."""
        # 3. Lightning takes one optimiser, schedules its learning rates, clips and saves all of it.
        return optim.for_model(self, rows=partial(optim.RowAdagrad, lr=0.1), rest=partial(torch.optim.AdamW, lr=2e-3))


def lines(ids: Tensor) -> TensorDataset:
    """Return lines of words [N, T] and the words that follow each of them [N, T]."""
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def main() -> None:
    """Train, and compare the sampled gradient with the exact one at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="epochs to train, each ends with a validation")
    parser.add_argument("--steps", type=int, default=250, help="steps of an epoch, at most")
    parser.add_argument("--files", type=int, default=None, help="source files to read (default: all)")
    parser.add_argument("--devices", type=int, default=1, help="devices to train on")
    parser.add_argument("--accelerator", default="auto", help="kind of device: cpu, gpu or auto")
    parser.add_argument("--precision", default="32-true", help="Lightning's precision, for example bf16-mixed")
    parser.add_argument("--folder", default=None, help="folder of checkpoints (default: none are saved)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the folder")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    arguments = parser.parse_args()
    L.seed_everything(arguments.seed, verbose=False)

    # 4. The callback lets a resumed training draw the same classes, and prepares sparse gradients for several devices.
    callbacks: list[L.Callback] = [SampledTraining()]
    if arguments.folder is not None:
        callbacks.append(ModelCheckpoint(arguments.folder, monitor="held_out", save_last=True))
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        limit_train_batches=arguments.steps,
        limit_val_batches=20,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        enable_checkpointing=arguments.folder is not None,
        logger=False,
    )

    text = standard_library(files=arguments.files, seed=arguments.seed)
    counts = ClassCounts.from_targets(text.train, text.num_classes)
    trainer.print(f"{len(text.train):,} words to train on, {text.num_classes:,} classes")
    unigram = -counts.frequency().log()[text.held_out].mean().item()
    trainer.print(f"held-out loss of frequencies alone: {unigram:.4f}")

    model = NextWord(counts)
    held_out = DataLoader(lines(text.held_out), BATCH_SIZE)
    trainer.fit(
        model,
        DataLoader(lines(text.train), BATCH_SIZE, shuffle=True, drop_last=True),
        held_out,
        ckpt_path=f"{arguments.folder}/last.ckpt" if arguments.resume else None,
    )
    trainer.print(f"held-out loss: {trainer.callback_metrics['held_out']:.4f}")

    if trainer.is_global_zero:
        print("\nError of the approximation against the exact gradient, on 8 held-out lines:")
        words, following = held_out.dataset[:8]
        with torch.no_grad():
            hidden = model.cpu()(words)
        print(diagnose(model.head, hidden, following))


if __name__ == "__main__":
    main()
