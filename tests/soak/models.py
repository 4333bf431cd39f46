"""Small data sets of each kind and format, and models trained on them."""

import random
from dataclasses import dataclass
from pathlib import Path

from tests.data.samples import SAMPLES, labels
from tests.soak.commands import called

_QUICK = ("--no-report", "--probe-every", 0, "--epochs", 1)


@dataclass(frozen=True)
class Small:
    """A small data set in one format.

    Args:
        file: the name of its file.
        data: the bytes of the file.
        options: options of `fit`.
        flags: options of all commands that read it.
        queries: the bytes that `predict` reads; None: the same.
        text: True if it is text.
    """

    file: str
    data: bytes
    options: tuple[object, ...]
    flags: tuple[object, ...] = ()
    queries: bytes | None = None
    text: bool = True

    def fit(self, data: Path, out: Path) -> tuple[object, ...]:
        """Return the arguments of a training."""
        return ("fit", data, "--out", out, *_QUICK, *self.options, *self.flags)

    def train(self, folder: Path) -> Path:
        """Write the data to a folder, train a model in it, and return the model's folder."""
        folder.mkdir(parents=True)
        write(folder / self.file, self.data)
        if self.queries is not None:
            write(folder / "queries", self.queries)
        done = called(*self.fit(folder / self.file, folder / "model"), "--checkpoint-every", 0)
        assert done.code == 0, f"{self.file}: {done.err}"
        return folder / "model"


def write(path: Path, data: bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(data)
    return path


def smalls(folder: Path) -> dict[str, Small]:
    """Make a data set of each format; further files that they need are written to a folder."""
    draw = random.Random(3)
    words = [" ".join(f"w{int(40 * draw.random() ** 2)}" for _ in range(6)) for _ in range(60)]
    text = ("\n".join(words) + "\n").encode()
    write(folder / "held-out.txt", text)
    write(folder / "labels.npy", labels())
    sequences = [(f"u{i % 20}", f"i{int(30 * draw.random() ** 2)}") for i in range(160)]
    triples = [(f"e{draw.randrange(25)}", f"r{draw.randrange(3)}", f"e{draw.randrange(25)}") for _ in range(150)]
    pairs = [triple[:2] for triple in triples[:20]]
    recurrent = ("--dim", 4, "--batch-size", 8, "--length", 8)
    made = {
        "text": Small(
            "a.txt", text, ("--text", *recurrent, "--k", 8, "--epochs", 6, "--held-out", folder / "held-out.txt")
        ),
        "sequences": Small("a.txt", _lines(sequences, " "), ("--sequences", *recurrent)),
        "triples": Small(
            "a.txt", _lines(triples, "\t"), ("--triples", "--dim", 4, "--batch-size", 32), queries=_lines(pairs, "\t")
        ),
    }
    for name, make in SAMPLES.items():
        ending = name.rsplit(".")[-1]
        flags = ("--labels", folder / "labels.npy") if ending == "npy" else ()
        text_like = ending in ("svm", "csv", "tsv")
        # Words are hashed into many features, so a projection keeps the model small.
        made[name] = Small(name, make(), ("--batch-size", 8, "--rank", 3), flags, text=text_like)
    return made


def _lines(rows: list[tuple[str, ...]], delimiter: str) -> bytes:
    return "".join(delimiter.join(row) + "\n" for row in rows).encode()
