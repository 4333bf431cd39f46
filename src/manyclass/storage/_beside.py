"""Files that are written beside the ones they replace."""

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from manyclass.errors import DiskFullError, UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What this process is writing: threads may save the same file. A process that was killed may have had its number.
_WRITTEN: set[str] = set()
_NUMBERS = itertools.count()
_LEFT_OVER = re.compile(r"(\d{1,20})-\d{1,20}", re.ASCII)


@contextlib.contextmanager
def replacing(path: Path, *, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write; once it is on disk as a whole it takes the place of `path`.

    Whatever goes wrong before leaves `path` and `keep` as they are, and nothing beside them. What processes that were
    killed left beside them is removed.

    Args:
        path: what is replaced, or made.
        keep: where to put the file that was there, in the same folder. None: nowhere.

    Raises:
        DiskFullError: the disk is full.
        UserError: it cannot be written for another reason.
    """
    target = Path(os.path.realpath(path))
    done = False
    try:
        if not target.parent.is_dir():
            raise UserError(f"cannot save {path}: there is no folder {target.parent}")
        _remove_left_over(target)
        with _beside(target) as beside:
            with beside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            with _kept(target, keep):
                os.replace(beside, target)
                done = True
        _sync_folder(target.parent)
    except OSError as error:
        raise _reason(path, error, done) from None


@contextlib.contextmanager
def _kept(target: Path, keep: Path | None) -> Iterator[None]:
    """Puts what is at `target` before at `keep` after.

    The old file gets a second name first, and that becomes `keep` only when the new file is in place. So at every
    moment `target` is a whole file, old or new; and if the old one should be damaged, `keep` is not given up for it
    before the new one is there.
    """
    if keep is None or not target.exists():
        yield
        return
    _remove_left_over(keep)
    with _beside(keep) as second:
        try:
            os.link(target, second)
        except OSError:
            # Some file systems have no second names.
            shutil.copyfile(target, second)
            _sync(second)
        yield
        os.replace(second, keep)


def _reason(path: Path, error: OSError, done: bool) -> UserError:
    if done:
        return UserError(f"saved {path}, but what is to follow failed: {error.strerror or error}")
    if error.errno in _FULL:
        return DiskFullError(f"disk full while saving {path}: nothing was overwritten; free some space and save again")
    return UserError(f"cannot save {path}: {error.strerror or error}; nothing was overwritten")


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside a path that nobody else has; no file is left there."""
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}-{next(_NUMBERS)}")
    _WRITTEN.add(beside.name)
    try:
        yield beside
    finally:
        # Renaming does nothing where both names are of one file already.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        _WRITTEN.discard(beside.name)


def _remove_left_over(path: Path) -> None:
    prefix = f"{path.name}.tmp-"
    for entry in list(os.scandir(path.parent)):
        found = _LEFT_OVER.fullmatch(entry.name.removeprefix(prefix)) if entry.name.startswith(prefix) else None
        if found and entry.name not in _WRITTEN and not _writes(int(found[1])):
            with contextlib.suppress(OSError):
                os.unlink(entry)


def _writes(process: int) -> bool:
    """Whether another process with that number is there."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
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
    """Have the new names on disk."""
    try:
        _sync(path)
    except OSError as error:
        # Some file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
