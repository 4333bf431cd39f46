"""Text files of a folder that others may have changed."""

import stat
from pathlib import Path

from manyclass.errors import UserError


def read_text(path: Path, *, max_bytes: int) -> str:
    """Read a text file in UTF-8.

    Args:
        path: the file.
        max_bytes: its largest size.

    Raises:
        OSError: the file cannot be opened.
        UserError: it is no regular file, or too large.
        ValueError: it is not UTF-8.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> _ = path.write_text("done")
        >>> read_text(path, max_bytes=100)
        'done'
    """
    # Opening a pipe would wait for a writer, and a device may have no end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"cannot read {path}: it is no file")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"cannot read {path}: it has more than {max_bytes:,} bytes")
    return data.decode("utf-8")
