"""Small data files of each kind with learnable classes, and settings that train on them fast."""

import random
from pathlib import Path

import torch

from manyclass import tasks
from manyclass.training import Callback

KINDS = ("features", "text", "sequences", "triples")
# The names of the metrics by default, and of the one that selects the best model if it is not the loss.
METRICS = {
    "features": ["accuracy", "accuracy@5"],
    "text": ["accuracy", "accuracy@10"],
    "sequences": ["MRR", "HR@10", "NDCG@10", "MRR@10"],
    "triples": ["MRR", "hits@1", "hits@3", "hits@10"],
}
BEST_BY = {"sequences": "NDCG@10", "triples": "MRR"}
CLASSES = 24  # of each kind; text has the end of a line too
SETTINGS = {
    "features": tasks.Settings(epochs=4, batch_size=16, k=8),
    "text": tasks.Settings(
        epochs=4, batch_size=4, dim=16, length=12, dropout=0.1, learning_rate=0.02, encoder_learning_rate=0.02, k=8
    ),
    "sequences": tasks.Settings(
        epochs=6,
        batch_size=8,
        dim=16,
        length=12,
        dropout=0.1,
        learning_rate=0.1,
        encoder_learning_rate=0.02,
        clip=5.0,
        k=8,
    ),
    "triples": tasks.Settings(epochs=30, batch_size=64, dim=16, learning_rate=0.5, k=8, regulariser=0.001),
}


def words():
    return [f"w{i:02}" for i in range(CLASSES)]


def walk(length, rng):
    """Return words of which each mostly determines the next."""
    at = int(CLASSES * rng.random() ** 2)
    found = []
    for _ in range(length):
        found.append(words()[at])
        at = (2 * at + 1) % CLASSES if rng.random() < 0.9 else int(CLASSES * rng.random() ** 2)
    return found


def write_features(folder, *, name="rows.svm", rows=240, seed=0):
    """Write rows whose first feature mostly is the class; some classes are frequent, some rare."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rows):
        label = int(CLASSES * rng.random() ** 2)
        shown = label if rng.random() < 0.9 else rng.randrange(CLASSES)
        lines.append(f"{words()[label]} {shown + 1}:1 {CLASSES + 1 + rng.randrange(8)}:{rng.random():.3f}")
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def write_rows(folder):
    write_features(folder, name="more.svm", rows=100, seed=1)
    return write_features(folder)


def write_text(folder, *, name="text", seed=0):
    rng = random.Random(seed)
    path = folder / name
    path.mkdir()
    for part, number in (("train", 60), ("valid", 20)):
        lines = [walk(12, rng) for _ in range(number)]
        # No word is unknown.
        lines += [words()] if part == "train" else []
        (path / f"{part}.txt").write_text("".join(" ".join(line) + "\n" for line in lines))
    return path


def write_sequences(folder, *, name="views.tsv", users=60, seed=0):
    rng = random.Random(seed)
    path = folder / name
    path.write_text("".join(f"u{user}\t{item}\n" for user in range(users) for item in walk(9, rng)))
    return path


def write_triples(folder, *, name="graph", seed=0):
    """Write triples whose relations are sums: i + n is the tail of i."""
    rng = random.Random(seed)
    entities = words()
    every = [(entities[i], f"plus {n}", entities[(i + n) % CLASSES]) for i in range(CLASSES) for n in range(1, 6)]
    rng.shuffle(every)
    path = folder / name
    path.mkdir()
    for part, triples in (("train", every[20:]), ("valid", every[:10]), ("test", every[10:20])):
        (path / f"{part}.txt").write_text("".join("\t".join(triple) + "\n" for triple in triples))
    return path


WRITERS = {
    "features": write_rows,
    "text": write_text,
    "sequences": write_sequences,
    "triples": write_triples,
}


def to_evaluate(kind, data):
    """Return data to evaluate a model on; for sequences and triples, the file that has a test part."""
    return {"features": data.parent / "more.svm", "text": data / "valid.txt"}.get(kind, data)


def fit(kind, folder, *, data=None, settings=None, options=None, **source):
    """Train on data of a kind in a new folder; the data is written unless it is given."""
    data = WRITERS[kind](folder) if data is None else data
    settings = SETTINGS[kind] if settings is None else settings
    out = folder / "model"
    options = tasks.RunOptions() if options is None else options
    return tasks.fit(kind, tasks.Source(data, **source), settings, out, options=options), out


class Interrupts(Callback):
    """A callback that raises KeyboardInterrupt after a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, training):
        if training.progress.step == self.step:
            raise KeyboardInterrupt


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def same_state(one, other):
    """Return True if two models have the same tensors, bit for bit."""
    first, second = one.state_dict(), other.state_dict()
    tensors = {name: value for name, value in first.items() if isinstance(value, torch.Tensor)}
    return set(first) == set(second) and all(torch.equal(value, second[name]) for name, value in tensors.items())
