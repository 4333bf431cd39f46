"""Plain text as the classes of its tokens."""

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from manyclass import _check
from manyclass.data.files import lines
from manyclass.errors import UserError

UNKNOWN, END = "<unk>", "<eos>"
_HELD_OUT = 20  # one line in so many, where no text is given to hold out
_RUN = 100  # lines that stay together: neighbours know each other
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
    kept = [(token, n) for token, n in count.items() if n >= min_count and token != UNKNOWN]
    unknown = len(train) - sum(n for _, n in kept)
    if unknown or any(token not in count for token in held_out):
        kept.append((UNKNOWN, unknown))
    # By name where they are as frequent: ids then follow from the text alone.
    vocabulary = tuple(token for token, _ in sorted(kept, key=lambda pair: (-pair[1], pair[0])))
    ids = {token: i for i, token in enumerate(vocabulary)}
    other = ids.get(UNKNOWN, -1)

    def numbered(tokens: Sequence[str]) -> Tensor:
        return torch.tensor([ids.get(token, other) for token in tokens], dtype=torch.int64)

    return Text(numbered(train), numbered(held_out), vocabulary, source)


def read_text(
    path: Path, *, held_out: Path | None = None, split: str = "spaces", min_count: int = 1, name: str = "data"
) -> Text:
    """Read a text to train on and one to hold out. Each line ends in a token of its own, `<eos>`.

    Args:
        path: a file; or a folder that holds `train.…` and `valid.…` or `test.…`.
        held_out: a file. None: that of the folder, or every twentieth hundred lines of the only file.
        split: what a token is: "spaces", what stands between them, or "words": runs of letters and digits, and each
            other mark by itself.
        min_count: how often a token must occur to be a class.
        name: what the user knows the path as, for errors.

    Raises:
        UserError: a file is missing, cannot be read, is no UTF-8 or holds no token.
    """
    _check.choice("split", split, tuple(SPLITS))
    if path.is_dir():
        train_path, held_out = _in_folder(path, "train", name), held_out or _in_folder(path, ("valid", "test"), name)
    else:
        train_path = path
    tokens = SPLITS[split]
    if held_out is None:
        parts: tuple[list[str], list[str]] = ([], [])
        for i, run in enumerate(_runs(lines(train_path, name=name))):
            parts[i % _HELD_OUT == _HELD_OUT // 2].extend(_tokens(run, tokens))
    else:
        parts = (list(_tokens(lines(train_path, name=name), tokens)), list(_tokens(lines(held_out, name=name), tokens)))
    for part, what in zip(parts, ("to train on", "to hold out"), strict=True):
        if len(part) < 2:
            raise UserError(f"`{name}` must hold more than {len(part)} tokens {what}, got {path}")
    return encode(*parts, min_count=min_count, source=path.name)


def _tokens(text: Iterable[str], split: Callable[[str], Sequence[str]]) -> Iterator[str]:
    for line in text:
        yield from split(line)
        yield END


def _runs(text: Iterator[str]) -> Iterator[list[str]]:
    while run := list(itertools.islice(text, _RUN)):
        yield run


def _in_folder(folder: Path, stems: str | tuple[str, ...], name: str) -> Path:
    for stem in (stems,) if isinstance(stems, str) else stems:
        if found := sorted(path for path in folder.iterdir() if path.name.split(".")[0] == stem):
            return found[0]
    wanted = stems if isinstance(stems, str) else " or ".join(stems)
    raise UserError(f"`{name}` must be a file, or a folder with a file {wanted}.txt, got {folder}, which has none")
