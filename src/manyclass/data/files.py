"""Text files, compressed or not."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from manyclass.errors import UserError

_OPENERS: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def lines(path: Path, *, name: str = "data") -> Iterator[str]:
    """The lines of a UTF-8 file without their ends; .gz, .xz and .bz2 are read as what they hold.

    Args:
        path: the file.
        name: what the user knows it as, for errors.

    Raises:
        UserError: it cannot be read, or holds something else than UTF-8.
    """
    number = 0
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):  # noqa: B007
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"`{name}` must be UTF-8, got byte 0x{error.object[error.start]:02x} after line {number} of {path}"
        ) from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"`{name}` must be a file that can be read, got {path}: {reason}") from None
