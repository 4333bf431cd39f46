"""The compiled kernels are built once and cached, and everything works without them."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from manyclass.kernels.cpu import build
from manyclass.samplers import Importance

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MANYCLASS_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    yield tmp_path / "manyclass"
    build.library.cache_clear()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A library built once, for the tests that do not depend on how it is built."""
    made = tmp_path_factory.mktemp("compiled") / "made.so"
    build._compile(COMPILER, made, time.monotonic() + 600)
    return made


@pytest.fixture
def quick(cache, compiled, tmp_path, monkeypatch):
    """The cache, with a compiler that copies a library."""
    copies = f'[ $1 = --version ] && exit 0\nfor last; do :; done\ncp {compiled} "$last"'
    monkeypatch.setenv("CXX", script(tmp_path / "copies", copies))
    return cache


@needs_compiler
def test_a_build_is_cached_and_loaded_again(cache):
    assert build.library() is not None
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() is not None
    assert made.stat().st_mtime_ns == before


@needs_compiler
def test_a_build_needs_no_writable_cache(cache):
    cache.write_text("a file where the folder should be")
    assert build.library() is not None


def planted(cache, content):
    """Replace the library of the cache by a file whose name has the digest of its content; return its path."""
    assert build.library() is not None
    (made,) = cache.iterdir()
    path = made.with_name(f"{made.name.rpartition('-')[0]}-{hashlib.sha256(content).hexdigest()}.so")
    made.unlink()
    path.write_bytes(content)
    path.chmod(0o700)
    build.library.cache_clear()
    return path


def loads(monkeypatch):
    """Return the list of files that are loaded from now on."""
    load, seen = ctypes.CDLL, []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: seen.append(Path(path)) or load(path))
    return seen


@needs_compiler
def test_a_file_cut_off_is_built_again_and_never_loaded(quick):
    """A load of half a library ends the process with SIGBUS, so this runs in another one."""
    assert build.library() is not None
    (made,) = quick.iterdir()
    whole = made.read_bytes()
    # Not by `truncate`: this process has loaded the file.
    made.unlink()
    made.write_bytes(whole[: len(whole) // 2])
    made.chmod(0o700)
    code = "from manyclass.kernels.cpu import build; print(build.library() is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
    assert made.read_bytes() == whole


@needs_compiler
def test_a_file_that_others_can_write_is_built_again(quick):
    path = planted(quick, b"no library")
    path.chmod(0o720)
    assert build.library() is not None


@needs_compiler
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(os.devnull)])
def test_what_is_no_file_is_not_loaded(quick, make):
    path = planted(quick, b"")
    path.unlink()
    make(path)
    assert build.library() is not None


@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_cache_that_others_can_write_to_is_not_used(quick, monkeypatch, caplog, mode):
    path = planted(quick, b"no library")
    quick.chmod(mode)
    seen = loads(monkeypatch)
    assert build.library() is not None
    assert path not in seen
    assert list(quick.iterdir()) == [path]
    assert "others can write to the cache" in caplog.text
    assert len(caplog.records) == 1
    assert not seen[0].exists()


@pytest.mark.parametrize(("owner", "mode", "trusted"), [(5, 0o755, True), (0, 0o755, True), (6, 0o755, False)])
def test_files_of_this_user_and_of_root_are_trusted(monkeypatch, owner, mode, trusted):
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    assert build._is_trusted(SimpleNamespace(st_uid=owner, st_mode=mode)) is trusted
    assert not build._is_trusted(SimpleNamespace(st_uid=owner, st_mode=mode | 0o020))


@needs_compiler
def test_a_library_without_a_function_is_not_used(quick, monkeypatch, caplog):
    monkeypatch.setattr(build, "SYMBOLS", build.SYMBOLS | {"manyclass_missing"})
    assert build.library() is None
    assert "has no function manyclass_missing" in caplog.text
    assert len(caplog.records) == 1


@needs_compiler
def test_a_user_without_a_home_builds_for_the_process(quick, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    seen = loads(monkeypatch)
    assert build.library() is not None
    assert "at every start, which takes some seconds: Could not determine home directory" in caplog.text
    assert not seen[0].parent.exists()


@needs_compiler
def test_a_library_is_synced_before_it_gets_its_name(quick, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: synced.append([sync(number), *quick.glob("native-*")]))
    assert build.library() is not None
    assert synced == [[None]]


@pytest.mark.parametrize("when", ["[ $1 = --version ] && exit 0", ""])
def test_a_compiler_that_hangs_is_ended_with_all_it_started(cache, monkeypatch, tmp_path, caplog, when):
    child = tmp_path / "child"
    hangs = script(tmp_path / "hangs", f"{when}\nsleep 600 &\necho $! > {child}\nwait")
    monkeypatch.setenv("CXX", hangs)
    monkeypatch.setattr(build, "COMPILER_SECONDS", 1.0)
    assert build.library() is None
    assert f"somewhat slower: {hangs} did not end within 1 seconds" in caplog.text
    end = time.monotonic() + 20
    while is_running(child.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid):
    """Return False for a process that has ended, even if it was not waited for."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_compiler_may_print_any_bytes_and_any_number_of_lines(cache, monkeypatch, tmp_path, caplog):
    text = "printf 'caf\\351\\n\\377 1\\n'\n[ $1 = --version ]"
    monkeypatch.setenv("CXX", script(tmp_path / "prints", text))
    assert build.library() is None
    assert caplog.records[0].getMessage().endswith("somewhat slower: caf\ufffd \ufffd 1")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", ["exit 0", "[ $1 = --version ]", "exit 1", "cat"])
def test_a_compiler_that_makes_nothing_is_reported(cache, monkeypatch, tmp_path, caplog, text):
    monkeypatch.setenv("CXX", script(tmp_path / "idle", text))
    assert build.library() is None
    assert len(caplog.records) == 1


def test_the_environment_can_switch_the_kernels_off(cache, monkeypatch):
    monkeypatch.setenv("MANYCLASS_NATIVE", "0")
    assert build.library() is None
    assert not build.is_available(torch.ones(1))


def test_without_a_compiler_draws_are_the_eager_ones(cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", os.devnull)
    with caplog.at_level(logging.INFO, "manyclass"):
        assert build.library() is None
    assert "no C++ compiler found" in caplog.text
    assert Importance(torch.ones(9), 3)(torch.tensor([0])).ids().shape == (1, 3)


@needs_compiler
def test_a_compiler_that_fails_is_reported_once_with_its_message(cache, monkeypatch, tmp_path, caplog):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'disk on fire' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.library() is None
    assert build.library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "disk on fire" in caplog.text
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_compiler_without_openmp_still_builds(cache, monkeypatch, tmp_path):
    compiler = tmp_path / "plain"
    compiler.write_text(f'#!/bin/sh\nfor flag; do [ "$flag" = -fopenmp ] && exit 1; done\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.library() is not None


def test_tensors_without_cpu_memory_stay_eager():
    assert not build.is_available(torch.ones(1, device="meta"))
