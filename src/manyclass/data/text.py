"""Plain text as the classes of its tokens."""

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
from manyclass.data.files import Watch, beginning, lines, writing
from manyclass.errors import UserError

UNKNOWN, END = "<unk>", "<eos>"
_HELD_OUT = 20  # one line in so many, where no text is given to hold out
_RUN = 100  # lines that stay together: neighbours know each other
_KEPT = ("train.bin", "held_out.bin")
_WORDS = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")

# How a line falls into tokens.
SPLITS: dict[str, Callable[[str], Sequence[str]]] = {"spaces": str.split, "words": _WORDS.findall}


@dataclass(frozen=True)
class Text:
    """Token ids of a text to train on and of one that is held out; ids go from frequent to rare.

    Args:
        train, held_out: int64 [N].
        vocabulary: the token of each id.
        source: where it came from, in words.
    """

    train: Tensor
    held_out: Tensor
    vocabulary: tuple[str, ...]
    source: str

    @property
    def num_classes(self) -> int:
        return len(self.vocabulary)


def encode(train: Sequence[str], held_out: Sequence[str], *, min_count: int = 1, source: str = "text") -> Text:
    """Number the tokens that occur often enough; the others are `<unk>`.

    Args:
        train, held_out: tokens.
        min_count: how often a token must occur in `train` to be a class.
        source: what to call it.

    Example:
        >>> text = encode("a b a c".split(), "a d".split(), min_count=2)
        >>> text.vocabulary, text.train, text.held_out
        (('<unk>', 'a'), tensor([1, 0, 1, 0]), tensor([1, 0]))
    """
    _check.whole("min_count", min_count, 1)
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
    watch: Watch | None = None,
) -> Text:
    """Read a text to train on and one to hold out. Each line ends in a token of its own, `<eos>`.

    It is read twice, to count tokens and to number them: memory holds the different tokens, and 8 bytes for each token
    there is, or none with a `folder`.

    Args:
        path: a file; or a folder that holds `train.…` and `valid.…` or `test.…`.
        held_out: a file. None: that of the folder, or every twentieth hundred lines of the only file; of one that is
            shorter than that, every twentieth part.
        split: what a token is: "spaces", what stands between them, or "words": runs of letters and digits, and each
            other mark by itself.
        min_count: how often a token must occur to be a class.
        folder: where to keep the ids, as files that are memory-mapped. None: in memory.
        name: what the user knows the path as, for errors.
        watch: told how far each file is read.

    Raises:
        UserError: a file is missing, cannot be read, is no UTF-8, holds no token, or changes while it is read; no token
            occurs often enough; the disk of `folder` is full.
    """
    _check.choice("split", split, tuple(SPLITS))
    _check.whole("min_count", min_count, 1)
    if path.is_dir():
        train_path, held_out = _in_folder(path, ("train",), name), held_out or _in_folder(path, ("valid", "test"), name)
    else:
        train_path = path
    run = _run(train_path, name) if held_out is None else None
    passes = _Passes(train_path, held_out, run, SPLITS[split], name, watch)
    counts = (collections.Counter[str](), collections.Counter[str]())
    for part, tokens in passes.lines():
        counts[part].update(tokens)
    sizes = [count.total() for count in counts]
    for size, what in zip(sizes, ("to train on", "to hold out"), strict=True):
        if size < 2:
            hint = ""
            if held_out is None and sizes[0] > 1:
                hint = f"; of one file, a line in {_HELD_OUT} is held out: a longer one does, or `held_out`"
            raise UserError(f"`{name}` must hold more than {size} tokens {what}, got {path}{hint}")
    vocabulary = _vocabulary(counts[0], min_count, any(token not in counts[0] for token in counts[1]))
    if not set(vocabulary) - {UNKNOWN, END}:
        most = max((n for token, n in counts[0].items() if token != END), default=0)
        raise UserError(
            f"`min_count` must leave a token to predict, got {min_count}, and none is more often than {most:,} times "
            f"in {path}"
        )
    del counts
    ids = {token: i for i, token in enumerate(vocabulary)}
    other = ids.get(UNKNOWN, -1)
    with contextlib.nullcontext() if folder is None else writing(folder, _KEPT):
        parts = [Ids(size, folder and folder / file) for size, file in zip(sizes, _KEPT, strict=True)]
        try:
            for part, tokens in passes.lines():
                found = [ids.get(token, other) for token in tokens]
                # What no class is for, or there is no room for, was not there when tokens were counted.
                if len(parts[part]) + len(found) > sizes[part] or (other < 0 and -1 in found):
                    break
                parts[part].add(found)
            if [len(kept) for kept in parts] != sizes:
                raise UserError(f"`{name}` must stay as it is while it is read, got other tokens at last in {path}")
            tensors = [kept.tensor() for kept in parts]
        finally:
            for kept in parts:
                kept.close()
    return Text(tensors[0], tensors[1], vocabulary, path.name)


@dataclass(frozen=True)
class _Passes:
    """The lines of a text to train on and of one to hold out, as often as wanted."""

    train: Path
    held_out: Path | None
    run: int | None
    split: Callable[[str], Sequence[str]]
    name: str
    watch: Watch | None

    def lines(self) -> Iterator[tuple[int, list[str]]]:
        """The tokens of each line, after which text it is of: 0, to train on; 1, to hold out."""
        for i, line in enumerate(lines(self.train, name=self.name, watch=self.watch)):
            apart = self.run is not None and i // self.run % _HELD_OUT == _HELD_OUT // 2
            yield int(apart), [*self.split(line), END]
        if self.held_out is not None:
            for line in lines(self.held_out, name=self.name, watch=self.watch):
                yield 1, [*self.split(line), END]


def _run(path: Path, name: str) -> int:
    """How many lines of a text without another to hold out are held out in a run."""
    number = sum(1 for _ in itertools.islice(lines(path, name=name), _RUN * _HELD_OUT))
    return max(1, number // _HELD_OUT)


def _vocabulary(count: Mapping[str, int], min_count: int, new: bool) -> tuple[str, ...]:
    """Tokens that occur often enough, from frequent to rare; `<unk>` where there are others, or new ones elsewhere."""
    kept = [(token, n) for token, n in count.items() if n >= min_count and token != UNKNOWN]
    unknown = sum(count.values()) - sum(n for _, n in kept)
    if unknown or new:
        kept.append((UNKNOWN, unknown))
    # By name where they are as frequent: ids then follow from the text alone.
    return tuple(token for token, _ in sorted(kept, key=lambda pair: (-pair[1], pair[0])))


def _in_folder(folder: Path, stems: tuple[str, ...], name: str) -> Path:
    for stem in stems:
        if found := beginning(folder, stem, name=name):
            return found
    wanted = " or ".join(stems)
    raise UserError(f"`{name}` must be a file, or a folder with a file {wanted}.txt, got {folder}, which has none")
