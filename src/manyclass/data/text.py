"""Plain text as token ids, the classes."""

import collections
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manyclass import _check
from manyclass.data._ids import Ids
from manyclass.data.files import ReadProgress, in_folder, lines, writing
from manyclass.errors import UserError

UNKNOWN, END = "<unk>", "<eos>"
_HELD_OUT_EVERY = 20  # one run of lines in this many is held out, if no held-out text is given
_RUN_LINES = 100  # lines held out together, since neighbouring lines are alike
_FILES = ("train.bin", "held_out.bin")
_WORDS = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")

# Functions that split a line into tokens.
SPLITS: dict[str, Callable[[str], Sequence[str]]] = {"spaces": str.split, "words": _WORDS.findall}


@dataclass(frozen=True)
class Text:
    """Token ids of a training text and of a held-out text; ids go from frequent to rare.

    Args:
        train, held_out: int64 [N].
        vocabulary: the token of each id.
        source: a description of the origin.
    """

    train: Tensor
    held_out: Tensor
    vocabulary: tuple[str, ...]
    source: str

    @property
    def num_classes(self) -> int:
        """The number of tokens in the vocabulary."""
        return len(self.vocabulary)


def encode(train: Sequence[str], held_out: Sequence[str], *, min_count: int = 1, source: str = "text") -> Text:
    """Number the tokens that occur at least `min_count` times; the others are `<unk>`.

    Args:
        train: tokens of the training text.
        held_out: tokens of the held-out text.
        min_count: occurrences in `train` for a token to be a class.
        source: a description of the origin.

    Example:
        >>> text = encode("a b a c".split(), "a d".split(), min_count=2)
        >>> text.vocabulary, text.train, text.held_out
        (('<unk>', 'a'), tensor([1, 0, 1, 0]), tensor([1, 0]))
    """
    _check.integer("min_count", min_count, 1)
    count = collections.Counter(train)
    vocabulary = _vocabulary(count, min_count, any(token not in count for token in held_out))
    ids = {token: i for i, token in enumerate(vocabulary)}
    other = ids.get(UNKNOWN, -1)

    def numbered(tokens: Sequence[str]) -> Tensor:
        return torch.tensor([ids.get(token, other) for token in tokens], dtype=torch.int64)

    return Text(numbered(train), numbered(held_out), vocabulary, source)


def read_text(
    path: Path,
    *,
    held_out: Path | None = None,
    split: str = "spaces",
    min_count: int = 1,
    folder: Path | None = None,
    name: str = "data",
    progress: ReadProgress | None = None,
) -> Text:
    """Read a training text and a held-out text. Each line ends in the token `<eos>`.

    Files are read twice, to count tokens and to number them. Memory holds the distinct tokens, and 8 bytes for each
    token of the text, or none with a `folder`.

    Args:
        path: a file; or a folder that holds `train.…` and `valid.…` or `test.…`.
        held_out: a file. None: the one in the folder; without a folder, every twentieth run of 100 lines, or of fewer
            in a file below 2,000 lines.
        split: "spaces": tokens are separated by spaces; "words": tokens are runs of letters and digits, and every
            other mark.
        min_count: occurrences for a token to be a class.
        folder: a folder for the ids, as memory-mapped files. None: in memory.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and in total, for each file.

    Raises:
        UserError: a file is missing, cannot be read, is not UTF-8, holds no token, or changes while it is read; no
            token occurs `min_count` times; the disk of `folder` is full.
    """
    _check.choice("split", split, tuple(SPLITS))
    _check.integer("min_count", min_count, 1)
    if path.is_dir():
        train_path = in_folder(path, ("train",), name=name)
        held_out = held_out or in_folder(path, ("valid", "test"), name=name)
    else:
        train_path = path
    run = _run(train_path, name) if held_out is None else None
    passes = _Passes(train_path, held_out, run, SPLITS[split], name, progress)
    counts = (collections.Counter[str](), collections.Counter[str]())
    for part, tokens in passes.lines():
        counts[part].update(tokens)
    sizes = [count.total() for count in counts]
    for size, purpose in zip(sizes, ("to train on", "to hold out"), strict=True):
        if size < 2:
            hint = ""
            if held_out is None and sizes[0] > 1:
                hint = f"; one line in {_HELD_OUT_EVERY} is held out: give a longer file, or `held_out`"
            raise UserError(f"`{name}` must hold more than {size} tokens {purpose}, got {path}{hint}")
    vocabulary = _vocabulary(counts[0], min_count, any(token not in counts[0] for token in counts[1]))
    if not set(vocabulary) - {UNKNOWN, END}:
        most = max((n for token, n in counts[0].items() if token != END), default=0)
        raise UserError(
            f"`min_count` must leave a token to predict, got {min_count}, and no token occurs more often than {most:,} "
            f"times in {path}"
        )
    del counts
    ids = {token: i for i, token in enumerate(vocabulary)}
    other = ids.get(UNKNOWN, -1)
    with contextlib.nullcontext() if folder is None else writing(folder, _FILES):
        parts = [Ids(size, folder and folder / file) for size, file in zip(sizes, _FILES, strict=True)]
        try:
            for part, tokens in passes.lines():
                found = [ids.get(token, other) for token in tokens]
                # A token without a class, or more tokens than counted: the file has changed since.
                if len(parts[part]) + len(found) > sizes[part] or (other < 0 and -1 in found):
                    break
                parts[part].add(found)
            if [len(kept) for kept in parts] != sizes:
                raise UserError(f"`{name}` must stay as it is while it is read, got other tokens later in {path}")
            tensors = [kept.tensor() for kept in parts]
        finally:
            for kept in parts:
                kept.close()
    return Text(tensors[0], tensors[1], vocabulary, path.name)


@dataclass(frozen=True)
class _Passes:
    """The lines of a training text and a held-out text, read any number of times."""

    train: Path
    held_out: Path | None
    run: int | None
    split: Callable[[str], Sequence[str]]
    name: str
    progress: ReadProgress | None

    def lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield 0 for a line of the training text and 1 for a held-out line, and its tokens."""
        for i, line in enumerate(lines(self.train, name=self.name, progress=self.progress)):
            apart = self.run is not None and i // self.run % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2
            yield int(apart), [*self.split(line), END]
        if self.held_out is not None:
            for line in lines(self.held_out, name=self.name, progress=self.progress):
                yield 1, [*self.split(line), END]


def _run(path: Path, name: str) -> int:
    """Return the number of lines in a run, if no held-out text is given."""
    number = sum(1 for _ in itertools.islice(lines(path, name=name), _RUN_LINES * _HELD_OUT_EVERY))
    return max(1, number // _HELD_OUT_EVERY)


def _vocabulary(count: Mapping[str, int], min_count: int, new: bool) -> tuple[str, ...]:
    """Return tokens of at least `min_count`, from frequent to rare; with `<unk>` if others occur here or are new."""
    kept = [(token, n) for token, n in count.items() if n >= min_count and token != UNKNOWN]
    unknown = sum(count.values()) - sum(n for _, n in kept)
    if unknown or new:
        kept.append((UNKNOWN, unknown))
    # Ties by name, so that ids do not depend on the order of the text.
    return tuple(token for token, _ in sorted(kept, key=lambda pair: (-pair[1], pair[0])))
