"""Real text that every machine has: the source code of Python's standard library."""

import random
import sys
import sysconfig
import tokenize
from pathlib import Path

from manyclass.data.text import Text, encode

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages"}


def standard_library(*, files: int | None = None, min_count: int = 2, seed: int = 0) -> Text:
    """Tokenise every file that is not a test; one file in twenty is held out.

    Args:
        files: the number of files to read. None: all.
        min_count: occurrences for a token to be a class; the others are `<unk>`.
        seed: seed of the choice of held-out files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not _NOT_SOURCE & set(path.relative_to(root).parts))
    texts = [tokens for path in paths[:files] if (tokens := _tokens(path))]
    random.Random(seed).shuffle(texts)
    cut = max(1, len(texts) // 20)
    held_out, train = ([token for text in part for token in text] for part in (texts[:cut], texts[cut:]))
    version = ".".join(map(str, sys.version_info[:3]))
    return encode(train, held_out, min_count=min_count, source=f"{len(texts)} files of Python {version}")


def _tokens(path: Path) -> list[str]:
    try:
        with tokenize.open(path) as file:
            return [token.string for token in tokenize.generate_tokens(file.readline) if token.string.strip()]
    except (SyntaxError, UnicodeDecodeError):
        return []  # A few files are invalid on purpose.
