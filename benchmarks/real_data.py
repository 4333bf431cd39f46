"""The data sets of the benchmarks as `manyclass fit` reads them: training, validation for the best epoch, and test.

Test examples are seen once, after the training. The best epoch is chosen by validation examples:

- nowplaying, tmall: every twentieth training session, which is not trained on; of each the last item is predicted. Test
  sessions are a separate file.
- beauty: the last item but one of each user. The last is for testing.
- wikitext-2, fb15k-237: their own parts.
- novels: one run of 100 lines in twenty of the training novels. Every twentieth novel is for testing.
"""

import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.novels import split_novels
from manyclass.tasks import Settings, Source

VALIDATION_ONE_IN = 20  # training sessions


@dataclass(frozen=True)
class DataSet:
    """A data set in files.

    Args:
        kind: kind of data, a key of `manyclass.tasks.TASKS`.
        source: data to train on, and validation data.
        test: data to evaluate on at the end.
        settings: the settings that differ from the defaults of the command.
    """

    kind: str
    source: Source
    test: Source
    settings: Settings


def sessions(name: str) -> Callable[[Path, Path], DataSet]:
    """Return a function that prepares one of the two session data sets."""

    def prepare(data: Path, work: Path) -> DataSet:
        folder = data / "sessions"
        parts = [work / f"{name}-{part}.txt" for part in ("train", "valid")]
        if not all(part.exists() for part in parts):
            split_sessions(folder / f"{name}-train.txt.xz", *parts)
        source = Source(parts[0], held_out=parts[1])
        return DataSet("sequences", source, Source(folder / f"{name}-test.txt.xz"), Settings())

    return prepare


def split_sessions(source: Path, train: Path, valid: Path) -> None:
    """Write every twentieth session, in the order of their first lines, to `valid` and the others to `train`."""
    number: dict[str, int] = {}
    temporary = [path.with_suffix(".part") for path in (train, valid)]
    with lzma.open(source, "rt") as file, temporary[0].open("w") as kept, temporary[1].open("w") as held_out:
        for line in file:
            place = number.setdefault(line.split(maxsplit=1)[0], len(number))
            (held_out if place % VALIDATION_ONE_IN == VALIDATION_ONE_IN - 1 else kept).write(line)
    for path, final in zip(temporary, (train, valid), strict=True):
        path.replace(final)


def beauty(data: Path, work: Path) -> DataSet:
    """Return purchases of beauty products."""
    file = data / "amazon-beauty" / "beauty.txt.xz"
    return DataSet("sequences", Source(file), Source(file), Settings())


def wikitext(data: Path, work: Path) -> DataSet:
    """Return WikiText-2."""
    folder = data / "wikitext-2"
    return DataSet("text", Source(folder), Source(folder / "test.txt.xz"), Settings())


def freebase(data: Path, work: Path) -> DataSet:
    """Return FB15k-237, whose triples are predicted in both directions."""
    folder = data / "fb15k-237"
    return DataSet("triples", Source(folder), Source(folder), Settings())


def novels(data: Path, work: Path) -> DataSet:
    """Split the Hungarian novels; words that occur at least three times are classes."""
    folder = work / "novels"
    if not folder.exists():
        temporary = work / "novels.part"
        split_novels(data / "eltec-hun" / "hun.txt.xz", temporary)
        shutil.move(temporary, folder)
    source = Source(folder / "train.txt.xz", split="words", min_count=3)
    # Two passes over eight million words take exact training a while, and more of them overfit.
    return DataSet("text", source, Source(folder / "test.txt.xz"), Settings(epochs=2))


DATA_SETS: dict[str, Callable[[Path, Path], DataSet]] = {
    "tmall": sessions("tmall"),
    "nowplaying": sessions("nowplaying"),
    "beauty": beauty,
    "wikitext-2": wikitext,
    "fb15k-237": freebase,
    "novels": novels,
}
