"""Next-token prediction over the Python standard library's own source, with a sampled softmax.

    python examples/next_token.py

Real text that every machine has: the source of the running interpreter's standard library, its test folders left out.
A small network reads the last eight tokens and predicts the next one among tens of thousands. It is trained by
scoring about a thousand of them a step; what is shown is the exact held-out likelihood, over all of them.
"""

import argparse
import collections
import math
import random
import sys
import sysconfig
import time
import tokenize
from pathlib import Path

import torch
from torch import Tensor, nn

from manyclass import ClassCounts, ClassHead, diagnose

CONTEXT, DIM, BATCH = 8, 64, 1024
UNKNOWN = "<unknown>"


def read_tokens(most_files: int | None) -> list[list[str]]:
    """The tokens of each source file that is not a test."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not {"test", "tests", "idle_test", "site-packages"} & set(path.relative_to(root).parts)
    )
    files = []
    for path in paths[:most_files]:
        try:
            with tokenize.open(path) as file:
                files.append(
                    [token.string for token in tokenize.generate_tokens(file.readline) if token.string.strip()]
                )
        except (SyntaxError, UnicodeDecodeError):
            continue  # a few files are there to be wrong
    return files


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


@torch.no_grad()
def held_out_loss(encoder: Encoder, head: ClassHead, context: Tensor, target: Tensor) -> float:
    """The exact negative log likelihood of a token, over all classes."""
    total = 0.0
    for part, expected in zip(context.split(2048), target.split(2048), strict=True):
        total += head.exact_loss(encoder(part), expected, reduction="sum").item()
    return total / len(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument("--files", type=int, default=None, help="how many source files to read (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)

    files = read_tokens(arguments.files)
    random.Random(arguments.seed).shuffle(files)
    cut = max(1, len(files) // 20)
    seen = collections.Counter(token for file in files[cut:] for token in file)
    vocabulary = {token: i for i, token in enumerate([UNKNOWN, *(t for t, n in seen.most_common() if n > 1)])}
    held_out, train = (
        torch.tensor([vocabulary.get(token, 0) for file in part for token in file])
        for part in (files[:cut], files[cut:])
    )
    num_classes = len(vocabulary)
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {version}: {len(files)} files, {len(train):,} tokens to train on, {num_classes:,} classes")

    counts = ClassCounts.from_targets(train, num_classes)
    embedding = nn.Embedding(num_classes, DIM)
    nn.init.normal_(embedding.weight, std=0.1)
    encoder = Encoder(embedding)
    head = ClassHead.tied(embedding, counts=counts)
    print(f"a step scores {len(head.sampler(train[:1]).ids()[0]):,} of them, by {type(head.sampler).__name__}")

    context, target = windows(train)
    test_context, test_target = (part[:20_000] for part in windows(held_out))
    unigram = -counts.frequency().log()[test_target].mean().item()
    print(f"{'seconds':>8} {'steps':>6} {'training loss':>14} {'held-out loss':>14} {'perplexity':>11}")
    print(f"{0:>8} {0:>6} {'':>14} {unigram:>14.3f} {math.exp(unigram):>11.1f}   frequencies alone")

    parameters = {*encoder.parameters(), *head.parameters()}
    optimizer = torch.optim.Adagrad(parameters, lr=0.05)
    spent, steps, shown, running = 0.0, 0, 0, 0.0
    try:
        while spent < arguments.seconds:
            start = time.perf_counter()
            rows = torch.randint(0, len(target), (BATCH,))
            optimizer.zero_grad()
            loss = head(encoder(context[rows]), target[rows])
            loss.backward()
            optimizer.step()
            spent += time.perf_counter() - start
            steps += 1
            running = loss.item() if steps == 1 else 0.98 * running + 0.02 * loss.item()
            if spent >= arguments.seconds * (shown + 1) / 6 or spent >= arguments.seconds:
                shown += 1
                nll = held_out_loss(encoder, head, test_context, test_target)
                print(f"{spent:>8.0f} {steps:>6} {running:>14.3f} {nll:>14.3f} {math.exp(nll):>11.1f}", flush=True)
    except KeyboardInterrupt:
        print("\nstopped early; this is what it has learned")

    print("\nThe approximation, beside the exact gradient on 256 held-out examples:")
    with torch.no_grad():
        hidden = encoder(test_context[:256])
    print(diagnose(head, hidden, test_target[:256]))

    words = list(vocabulary)
    print("\nWhat it expects next:")
    for line in ("for i in range", "raise ValueError", "if __name__ ==", "import os , sys"):
        tokens = [UNKNOWN] * CONTEXT + line.split()
        with torch.no_grad():
            best = head.topk(encoder(torch.tensor([[vocabulary.get(t, 0) for t in tokens[-CONTEXT:]]])), 4)
        guesses = zip(best.ids[0].tolist(), best.log_prob[0].exp().tolist(), strict=True)
        print(f"  {line:20}" + "   ".join(f"{words[i]} {p:.0%}" for i, p in guesses))


if __name__ == "__main__":
    main()
