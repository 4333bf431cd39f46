"""A lock on the folder of a training: two trainings in one folder would overwrite each other's checkpoints."""

import contextlib
import errno
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from manyclass.errors import UserError, notify

if sys.platform != "win32":
    import fcntl

LOCK = ".manyclass-lock"
_MAX_BYTES = 4096
_NOT_SUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases when the process ends, also if it is killed.

    The file that is locked says which process holds it; the file that a killed process leaves is no obstacle.

    Raises:
        UserError: another training holds the lock, the folder cannot be written to, or a file with the lock's name
            is not from `manyclass fit`.
    """
    if sys.platform == "win32":
        yield
        return
    path = folder / LOCK
    try:
        number = _lock(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"`--out` must be a folder that can be written to, got {folder}: {reason}") from None
    try:
        yield
    finally:
        # The name is removed first: once the lock is released, the file may be that of another process.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(number)


def _lock(path: Path) -> int:
    """Return the descriptor of the locked file."""
    while True:
        # A link would lead to a file elsewhere; opening a pipe would wait.
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            _flock(number, path)
            if _is_at(number, path):
                _write_holder(number, path)
                return number
        except BaseException:
            os.close(number)
            raise
        # The process that held the lock has removed the file since it was opened.
        os.close(number)


def _flock(number: int, path: Path) -> None:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.pread(number, _MAX_BYTES, 0)) or "another process has trained in it"
        raise UserError(
            f"`--out` must be a folder that no other training writes to, got {path.parent}: {holder}"
        ) from None
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        advice = "start no second training in it"
        notify(f"{path.parent} cannot be locked, {error.strerror}: {advice}")


def _is_at(number: int, path: Path) -> bool:
    """Return True if an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(number), path.lstat())
    except FileNotFoundError:
        return False


def _write_holder(number: int, path: Path) -> None:
    found = os.pread(number, _MAX_BYTES, 0)
    # After a power failure the file may be empty or hold zeros.
    if not stat.S_ISREG(os.fstat(number).st_mode) or (found.strip(b"\0") and _holder(found) is None):
        raise UserError(f"`--out` must hold no {LOCK} that `manyclass fit` did not write, got {path}: move it away")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.ftruncate(number, 0)
    os.pwrite(number, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)


def _holder(content: bytes) -> str | None:
    """Return a phrase that names the process in a lock file; None: the content is not that of a lock file."""
    try:
        found = json.loads(content)
        host, pid, since = (found[name] for name in ("host", "pid", "since"))
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if not isinstance(pid, int) or not all(isinstance(x, str) and x.isprintable() for x in (host, since)):
        return None
    return f"process {pid} on {host} has trained in it since {since}"
