"""The exactly trained reference model, cached in a file."""

from pathlib import Path
from typing import Any

import torch

from manyclass.heads import ClassHead
from manyclass.lab.study.model import Encoder, build_model, load_text, loss_columns, train_model
from manyclass.storage import atomic_write


def train_exactly(*, text: str, rate: float, seed: int, epochs: int, device: str, folder: str) -> dict[str, Any]:
    """Compute a cell: train exactly, save the model, and return the exact held-out losses."""
    train, held_out, num_classes = load_text(Path(folder) / f"{text}.pt", device)
    done = train_model(train, held_out, num_classes, design=None, k=0, rate=rate, seed=seed, epochs=epochs)
    path = _path(folder, text=text, rate=rate, seed=seed, epochs=epochs, device=device)
    with atomic_write(path) as temporary:
        kept = {"encoder": done.encoder.state_dict(), "weight": done.head.weight, "bias": done.head.bias}
        torch.save(kept, temporary)
    return loss_columns(done.points)


def load_reference(
    *, text: str, rate: float, seed: int, epochs: int, device: str, folder: str
) -> tuple[Encoder, ClassHead]:
    """Load the exactly trained model in eval mode; train it first if it is not cached."""
    path = _path(folder, text=text, rate=rate, seed=seed, epochs=epochs, device=device)
    if not path.exists():
        train_exactly(text=text, rate=rate, seed=seed, epochs=epochs, device=device, folder=folder)
    train, _, num_classes = load_text(Path(folder) / f"{text}.pt", device)
    encoder, head = build_model(train, num_classes, seed=seed)
    found = torch.load(path, weights_only=True, map_location=device)
    encoder.load_state_dict(found["encoder"])
    with torch.no_grad():
        head.weight.copy_(found["weight"])
        assert head.bias is not None
        head.bias.copy_(found["bias"])
    return encoder.eval(), head


def _path(folder: str, *, text: str, rate: float, seed: int, epochs: int, device: str) -> Path:
    return Path(folder) / f"exact-{text}-{rate:g}-{seed}-{epochs}-{device}.pt"
