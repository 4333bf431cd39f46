"""A failed save changes nothing, and at every moment of a save there is a whole file."""

import concurrent.futures
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

from manyclass import storage
from manyclass.errors import UserError
from manyclass.storage import atomic
from tests.storage.trees import CONTENT, same, saved


def assert_intact(folder, path):
    assert [entry.name for entry in folder.iterdir()] == [path.name]
    assert same(storage.load(path, content_type="thing"), CONTENT)


@contextlib.contextmanager
def files_of_at_most(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_file_size_leaves_the_old_file(tmp_path):
    path = saved(tmp_path)
    for content in ({"big": torch.ones(1 << 20)}, {"many": [torch.full((999,), i) for i in range(99)]}):
        with files_of_at_most(100_000), pytest.raises(UserError, match=f"disk full while saving {path}: nothing was"):
            storage.save(path, content, content_type="thing")
        assert_intact(tmp_path, path)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 1 MiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_leaves_the_old_file(small_disk):
    path = saved(small_disk)
    with pytest.raises(UserError, match=f"disk full while saving {path}: nothing was overwritten"):
        storage.save(path, {"big": torch.ones(1 << 20)}, content_type="thing")
    assert_intact(small_disk, path)
    storage.save(path, {"small": torch.ones(1 << 16)}, content_type="thing")
    assert list(storage.load(path, content_type="thing")) == ["small"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_system_error_leaves_the_old_file(tmp_path, monkeypatch, call):
    def fails(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = saved(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, call, fails)
        with pytest.raises(UserError, match=f"cannot save {path}: Input/output error; nothing was overwritten"):
            storage.save(path, {}, content_type="thing")
    assert_intact(tmp_path, path)


def test_ctrl_c_leaves_the_old_file(tmp_path, monkeypatch):
    def pressed(*args):
        raise KeyboardInterrupt

    path = saved(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(atomic.os, "fsync", pressed)
        with pytest.raises(KeyboardInterrupt):
            storage.save(path, {}, content_type="thing")
    assert_intact(tmp_path, path)


def test_the_folder_must_exist_and_the_file_must_not_be_a_folder(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        storage.save(tmp_path / "gone" / "x", {}, content_type="thing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot save .*folder: Is a directory; nothing was overwritten"):
        storage.save(tmp_path / "folder", {}, content_type="thing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_temporary_files_of_killed_processes_are_removed_by_the_next_save(tmp_path):
    command = f"""
import torch, time
from pathlib import Path
from manyclass.storage import atomic_write
with atomic_write(Path({str(tmp_path)!r}) / "it.safetensors") as temporary:
    temporary.write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        path = saved(tmp_path)
        # A running process is still writing.
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(signal.SIGKILL)
    others = [tmp_path / "it.safetensors.tmp-mine", tmp_path / "other.safetensors.tmp-1"]
    for other in others:
        other.touch()
    saved(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "it.safetensors"
    path.symlink_to(tmp_path / "there" / "it.safetensors")
    saved(tmp_path / "here")
    assert path.is_symlink()
    assert_intact(tmp_path / "there", tmp_path / "there" / "it.safetensors")


@pytest.mark.parametrize("links", [True, False])
def test_the_replaced_file_is_kept(tmp_path, monkeypatch, links):
    def refuses(*args):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(atomic.os, "link", refuses)
    path, keep = tmp_path / "newest", tmp_path / "previous"
    for number in range(4):
        storage.save(path, {"number": number}, content_type="thing", keep=keep)
        assert storage.load(path, content_type="thing") == {"number": number}
        assert not keep.exists() if number == 0 else storage.load(keep, content_type="thing") == {"number": number - 1}
    if links:
        # A process killed between the two renames leaves two names of one file.
        keep.unlink()
        keep.hardlink_to(path)
        storage.save(path, {"number": 4}, content_type="thing", keep=keep)
        assert storage.load(keep, content_type="thing") == {"number": 3}
    assert {entry.name for entry in tmp_path.iterdir()} == {"newest", "previous"}


def test_at_every_moment_there_is_a_sound_file(tmp_path, monkeypatch):
    path, keep = tmp_path / "newest", tmp_path / "previous"
    for number in range(2):
        storage.save(path, {"number": number}, content_type="thing", keep=keep)
    seen = []

    def watched(call):
        def wrapper(*args, **options):
            look()
            call(*args, **options)
            look()

        return wrapper

    def look():
        found = []
        for each in (path, keep):
            with contextlib.suppress(UserError):
                found.append(storage.load(each, content_type="thing")["number"])
        seen.append(found)

    for name in ("link", "replace", "fsync", "unlink"):
        monkeypatch.setattr(atomic.os, name, watched(getattr(os, name)))
    storage.save(path, {"number": 2}, content_type="thing", keep=keep)
    assert [found for before, found in zip([None, *seen], seen, strict=False) if found != before] == [
        [1, 0],
        [2, 0],
        [2, 1],
    ]
    # The same holds if the newest file is damaged when the next is saved.
    path.write_bytes(b"damaged")
    seen.clear()
    storage.save(path, {"number": 3}, content_type="thing", keep=keep)
    assert all(seen)
    assert storage.load(path, content_type="thing") == {"number": 3}


@pytest.mark.machine
def test_a_tensor_is_not_copied_to_be_saved(tmp_path):
    command = f"""
import resource, torch
from pathlib import Path
from manyclass import storage
path = Path({str(tmp_path)!r}) / "big"
storage.save(path, {{"small": torch.ones(3)}}, content_type="thing")
table = torch.ones(1 << 24)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
storage.save(path, {{"table": table}}, content_type="thing")
assert peak() - before < table.nbytes / 4, peak() - before
loaded = storage.load(path, content_type="thing")
assert peak() - before < table.nbytes * 5 / 4, peak() - before
assert torch.equal(loaded["table"], table)
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    assert saved(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_threads_that_save_one_file_leave_a_whole_one(tmp_path):
    path = tmp_path / "thing.safetensors"
    contents = [{"number": torch.full((1000,), float(i))} for i in range(8)]

    def save(content):
        for _ in range(20):
            storage.save(path, content, content_type="thing", keep=tmp_path / "kept.safetensors")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(save, contents))
    for name in ("thing", "kept"):
        found = storage.load(tmp_path / f"{name}.safetensors", content_type="thing")["number"]
        assert (found == found[0]).all()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept.safetensors", "thing.safetensors"]


def test_temporary_files_of_a_killed_process_with_the_same_pid_are_removed(tmp_path):
    """In a container every run may have the same pid."""
    path = saved(tmp_path)
    left_over = tmp_path / f"{path.name}.tmp-{os.getpid()}-999"
    left_over.mkdir()
    (left_over / "new").write_bytes(b"half")
    storage.save(path, CONTENT, content_type="thing")
    assert_intact(tmp_path, path)


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=f"cannot save .*{name}: it is no file; nothing was overwritten"):
            storage.write_json(tmp_path / name, {})
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_a_symbolic_link_is_replaced_where_it_may_lead_anywhere(tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "link"
    precious.write_text("mine")
    path.symlink_to(precious)
    with atomic.atomic_write(path, follow_links=False) as temporary:
        temporary.write_text("ours")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("mine", "ours", False)
