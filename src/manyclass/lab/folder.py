"""The folder that a run writes into: its own, or none."""

import os
from pathlib import Path

from manyclass.errors import UserError


def claim_folder(path: Path, kind: str) -> None:
    """Make a folder, or see that it is one that an earlier run of this kind made, before anything is computed.

    Args:
        path: the folder.
        kind: what writes into it; a file of that name marks it.

    Raises:
        UserError: it is no folder, cannot be written to, or holds somebody else's files.
    """
    mark = path / f".manyclass-{kind}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(path.iterdir()):
            raise UserError(
                f"`out` must be a new or empty folder, or one of an earlier run, got {path}, which has other files"
            )
        mark.touch()
    except FileExistsError:
        raise UserError(f"`out` must be a folder, got {path}, which is a file") from None
    except OSError as error:
        raise UserError(f"`out` must be a folder that can be written to, got {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"`out` must be a folder that can be written to, got {path}")
