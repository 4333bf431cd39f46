import os
import signal

import pytest
import torch

# Without a GPU Triton's kernels run in its interpreter, which must be known before they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from manyclass.kernels import all_classes, triton
from manyclass.kernels.cpu import build


def pytest_configure():
    # A background process ignores Ctrl-C, so restore the handler that the tests of interrupts need.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def use(kernels, monkeypatch):
    """Let the kernels of a kind run, and no others."""
    if kernels == "compiled":
        if build.library() is None:
            pytest.skip("no C++ compiler on this machine")
        return
    monkeypatch.setattr(build, "library", lambda: None)
    if kernels == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("on a GPU they are not interpreted: tests/test_gpu.py runs them")
        monkeypatch.setattr(triton, "is_available", lambda *tensors: not torch.compiler.is_compiling())


@pytest.fixture(params=["compiled", "eager"])
def kernels(request, monkeypatch):
    """Run a test with the compiled kernels and without them."""
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["compiled", "eager", "triton"])
def all_kernels(request, monkeypatch):
    """Run a test with the compiled kernels of the CPU, without kernels, and with those of GPUs."""
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def interpreted(monkeypatch):
    """Run a test with the kernels of GPUs alone."""
    use("triton", monkeypatch)


@pytest.fixture
def runs_of_256_classes(monkeypatch):
    """Let what is not kept of an exact loss go through runs of 256 classes."""
    monkeypatch.setattr(all_classes, "RUN_SCORES", {"cpu": 1, "cuda": 1})
