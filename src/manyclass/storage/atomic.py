"""Atomic replacement of files: written in a temporary folder, synced, then renamed."""

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from manyclass.errors import DiskFullError, UserError

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Temporary folders in use by this process: threads may save the same file, and a killed process may have had our pid.
_IN_USE: set[str] = set()
_NUMBERS = itertools.count()
_LEFT_OVER = re.compile(r"(\d{1,20})-\d{1,20}", re.ASCII)


@contextlib.contextmanager
def atomic_write(path: Path, *, keep: Path | None = None, follow_links: bool = True) -> Iterator[Path]:
    """Yield a path to write a file to, which then replaces `path` by atomic rename.

    On any error `path` and `keep` stay as they are and no temporary file remains. Temporary files of killed processes
    are removed.

    Args:
        path: the file to replace or create.
        keep: new name of the file replaced, in the same folder. None: it is deleted.
        follow_links: whether a symbolic link at `path` leads to the file to replace. If not, the link is replaced: in a
            folder that was received, it may lead anywhere.

    Raises:
        DiskFullError: the disk is full.
        UserError: the file cannot be written for another reason.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with atomic_write(path) as temporary:
        ...     _ = temporary.write_text("done")
        >>> path.read_text()
        'done'
    """
    target = Path(os.path.realpath(path)) if follow_links else Path(os.path.realpath(path.parent)) / path.name
    done = False
    try:
        if not target.parent.is_dir():
            raise UserError(f"cannot save {path}: there is no folder {target.parent}")
        if target.exists() and not (target.is_file() or target.is_dir() or target.is_symlink()):
            # A rename would replace a device or a pipe, such as /dev/null.
            raise UserError(f"cannot save {path}: it is no file; nothing was overwritten")
        _remove_left_overs(target)
        with _temporary_folder(target) as folder:
            yield folder / "new"
            _sync(folder / "new")
            with _kept(target, keep, folder / "old"):
                os.replace(folder / "new", target)
                done = True
        _sync_folder(target.parent)
    except OSError as error:
        raise _reason(path, error, done) from None


@contextlib.contextmanager
def _kept(target: Path, keep: Path | None, second: Path) -> Iterator[None]:
    """Move the file at `target` on entry to `keep` on exit.

    The old file gets a second name first, which becomes `keep` only when the new file is in place. So at every moment
    `target` is a whole file, old or new; and if `target` is damaged, the file at `keep` stays until the new one is in
    place.
    """
    if keep is None or not target.exists():
        yield
        return
    try:
        os.link(target, second)
    except OSError:
        # Some file systems have no hard links.
        shutil.copyfile(target, second)
        _sync(second)
    yield
    os.replace(second, keep)


def _reason(path: Path, error: OSError, done: bool) -> UserError:
    if done:
        return UserError(f"saved {path}, but a later step failed: {error.strerror or error}")
    if error.errno in _DISK_FULL:
        return DiskFullError(f"disk full while saving {path}: nothing was overwritten; free some space and save again")
    return UserError(f"cannot save {path}: {error.strerror or error}; nothing was overwritten")


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Make a folder with a unique name next to a path, and remove it with its content on exit."""
    folder = path.with_name(f"{path.name}.tmp-{os.getpid()}-{next(_NUMBERS)}")
    _IN_USE.add(folder.name)
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _IN_USE.discard(folder.name)


def _remove_left_overs(path: Path) -> None:
    prefix = f"{path.name}.tmp-"
    for entry in list(os.scandir(path.parent)):
        found = _LEFT_OVER.fullmatch(entry.name.removeprefix(prefix)) if entry.name.startswith(prefix) else None
        if found and entry.name not in _IN_USE and not _is_running(int(found[1])):
            shutil.rmtree(entry, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Return True if another process has this pid."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    try:
        _sync(path)
    except OSError as error:
        # Some file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
