"""The output folder of a run, which no other program's files may share."""

import os
from pathlib import Path

from manyclass.errors import UserError


def claim_folder(path: Path, command: str) -> None:
    """Create the output folder, or check that an earlier run of the same command created it.

    Args:
        path: the folder.
        command: the command that writes into it; a marker file carries this name.

    Raises:
        UserError: the path is not a folder, is not writable, or holds files that no run of this command wrote.
    """
    marker = path / f".manyclass-{command}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not marker.exists() and any(path.iterdir()):
            raise UserError(
                f"`out` must be a new or empty folder, or one of an earlier run, got {path}, which has other files"
            )
        marker.touch()
    except FileExistsError:
        raise UserError(f"`out` must be a folder, got {path}, which is a file") from None
    except OSError as error:
        raise UserError(f"`out` must be a folder that can be written to, got {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"`out` must be a folder that can be written to, got {path}")
