"""Next-token prediction on the source of Python's standard library, with a sampled softmax.

    python examples/next_token.py

The text is on every machine: the source of the interpreter's standard library, without its test folders. A small
network reads the last eight tokens and predicts the next one among tens of thousands. A training step scores about a
thousand of them; the held-out loss shown is exact, over all of them. Ctrl-C ends training early.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.data import standard_library
from manyclass.training import HeldOut, ProgressLine, Training

CONTEXT, DIM, BATCH_SIZE = 8, 64, 1024


def windows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return contexts [N, 8] and the tokens [N] that follow them."""
    rows = ids.unfold(0, CONTEXT + 1, 1)
    return rows[:, :-1], rows[:, -1]


class Encoder(nn.Module):
    """Network that maps the embeddings of the last tokens to one vector."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.mix = nn.Sequential(nn.Linear(CONTEXT * DIM, 256), nn.ReLU(), nn.Linear(256, DIM))

    def forward(self, context: Tensor) -> Tensor:
        """Encode contexts [B, 8] as [B, 64]."""
        mixed: Tensor = self.mix(self.embedding(context).flatten(1))
        return mixed


class Shuffled:
    """Batches of the examples, reshuffled in each epoch."""

    def __init__(self, context: Tensor, target: Tensor, *, seed: int) -> None:
        self.context, self.target, self.seed = context, target, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.target) / BATCH_SIZE)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for rows in torch.randperm(len(self.target), generator=generator).split(BATCH_SIZE):
            yield self.context[rows], self.target[rows]


def main() -> None:
    """Train, diagnose and complete a few prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to train")
    parser.add_argument("--steps", type=int, default=None, help="steps to train, instead of seconds")
    parser.add_argument("--files", type=int, default=None, help="source files to read (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)

    text = standard_library(files=arguments.files, seed=arguments.seed)
    train, held_out, num_classes = text.train, text.held_out, text.num_classes
    print(f"{text.source}: {len(train):,} tokens to train on, {num_classes:,} classes")

    counts = ClassCounts.from_targets(train, num_classes)
    embedding = nn.Embedding(num_classes, DIM)
    nn.init.normal_(embedding.weight, std=0.1)
    encoder = Encoder(embedding)
    head = ClassHead.tied(embedding, counts=counts)
    print(f"{len(head.sampler(train[:1]).ids()[0]):,} of them scored per step, by {type(head.sampler).__name__}")

    context, target = windows(train)
    test_context, test_target = (part[:20_000] for part in windows(held_out))
    unigram = -counts.frequency().log()[test_target].mean().item()
    print(f"held-out loss of frequencies alone {unigram:.4f}, perplexity {math.exp(unigram):.1f}\n", flush=True)

    # Head and encoder share a table; the set holds each parameter once.
    parameters = {*encoder.parameters(), *head.parameters()}
    history = Training(
        head,
        Shuffled(context, target, seed=arguments.seed),
        torch.optim.Adagrad(parameters, lr=0.05),
        encoder=encoder,
        steps=arguments.steps,
        seconds=arguments.seconds if arguments.steps is None else None,
        held_out=HeldOut(
            list(zip(test_context.split(2048), test_target.split(2048), strict=True)), every=250, restore_best=True
        ),
        report_every=10,
        callbacks=[ProgressLine(file=sys.stdout)],
        seed=arguments.seed,
    ).run()
    if history.best_loss is not None:
        print(f"best perplexity {math.exp(history.best_loss):.1f}")

    print("\nError of the approximation against the exact gradient, on 256 held-out examples:")
    with torch.no_grad():
        hidden = encoder(test_context[:256])
    print(diagnose(head, hidden, test_target[:256]))

    words = text.vocabulary
    ids = {word: i for i, word in enumerate(words)}
    print("\nMost probable next tokens:")
    for line in ("for i in range", "raise ValueError", "if __name__ ==", "import os , sys"):
        tokens = ["<unk>"] * CONTEXT + line.split()
        with torch.no_grad():
            best = head.topk(encoder(torch.tensor([[ids.get(t, ids["<unk>"]) for t in tokens[-CONTEXT:]]])), 4)
        guesses = zip(best.ids[0].tolist(), best.log_prob[0].exp().tolist(), strict=True)
        print(f"  {line:20}" + "   ".join(f"{words[i]} {p:.0%}" for i, p in guesses))


if __name__ == "__main__":
    main()
