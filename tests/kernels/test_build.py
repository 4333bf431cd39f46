"""The compiled kernels are built once and cached, and everything works without them."""

import logging
import os
import shutil

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
