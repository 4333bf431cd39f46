"""Next-token prediction over the Python standard library's own source, with a sampled softmax.

    python examples/next_token.py

Real text that every machine has: the source of the running interpreter's standard library, its test folders left out.
A small network reads the last eight tokens and predicts the next one among tens of thousands. It is trained by
scoring about a thousand of them a step; the held-out loss that is shown is exact, over all of them.
Ctrl-C ends it early.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.data import standard_library
from manyclass.training import HeldOut, Probe, ProgressLine, Training

CONTEXT, DIM, BATCH = 8, 64, 1024


def windows(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Contexts [N, 8] and the tokens that follow them [N]."""
    rows = ids.unfold(0, CONTEXT + 1, 1)
    return rows[:, :-1], rows[:, -1]


class Encoder(nn.Module):
    """Mixes the embeddings of the last tokens into one vector."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.mix = nn.Sequential(nn.Linear(CONTEXT * DIM, 256), nn.ReLU(), nn.Linear(256, DIM))

    def forward(self, context: Tensor) -> Tensor:
        mixed: Tensor = self.mix(self.embedding(context).flatten(1))
        return mixed


class Shuffled:
    """Batches of the examples, each epoch in an order of its own."""

    def __init__(self, context: Tensor, target: Tensor, *, seed: int) -> None:
        self.context, self.target, self.seed = context, target, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.target) / BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for rows in torch.randperm(len(self.target), generator=generator).split(BATCH):
            yield self.context[rows], self.target[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument("--files", type=int, default=None, help="how many source files to read (default: all)")
    parser.add_argument("--seed", type=int, default=0)
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
    print(f"a step scores {len(head.sampler(train[:1]).ids()[0]):,} of them, by {type(head.sampler).__name__}")

    context, target = windows(train)
    test_context, test_target = (part[:20_000] for part in windows(held_out))
    unigram = -counts.frequency().log()[test_target].mean().item()
    print(f"held-out loss of frequencies alone {unigram:.4f}, perplexity {math.exp(unigram):.1f}\n", flush=True)

    # The head's table is the encoder's too: each parameter once.
    parameters = {*encoder.parameters(), *head.parameters()}
    history = Training(
        head,
        Shuffled(context, target, seed=arguments.seed),
        torch.optim.Adagrad(parameters, lr=0.05),
        encoder=encoder,
        seconds=arguments.seconds,
        held_out=HeldOut(
            list(zip(test_context.split(2048), test_target.split(2048), strict=True)), every=250, restore_best=True
        ),
        probe=Probe(every=250),
        report_every=10,
        callbacks=[ProgressLine(file=sys.stdout)],
        seed=arguments.seed,
    ).run()
    if history.best_loss is not None:
        print(f"best perplexity {math.exp(history.best_loss):.1f}")

    print("\nThe approximation, beside the exact gradient on 256 held-out examples:")
    with torch.no_grad():
        hidden = encoder(test_context[:256])
    print(diagnose(head, hidden, test_target[:256]))

    words = text.vocabulary
    ids = {word: i for i, word in enumerate(words)}
    print("\nWhat it expects next:")
    for line in ("for i in range", "raise ValueError", "if __name__ ==", "import os , sys"):
        tokens = ["<unk>"] * CONTEXT + line.split()
        with torch.no_grad():
            best = head.topk(encoder(torch.tensor([[ids.get(t, ids["<unk>"]) for t in tokens[-CONTEXT:]]])), 4)
        guesses = zip(best.ids[0].tolist(), best.log_prob[0].exp().tolist(), strict=True)
        print(f"  {line:20}" + "   ".join(f"{words[i]} {p:.0%}" for i, p in guesses))


if __name__ == "__main__":
    main()
