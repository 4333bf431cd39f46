import signal

import pytest

from manyclass.kernels import all_classes
from manyclass.kernels.cpu import build


def pytest_configure():
    # A background process ignores Ctrl-C, so restore the handler that the tests of interrupts need.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["compiled", "eager"])
def kernels(request, monkeypatch):
    """Run a test with the compiled kernels and without them."""
    if request.param == "eager":
        monkeypatch.setattr(build, "library", lambda: None)
    elif build.library() is None:
        pytest.skip("no C++ compiler on this machine")
    return request.param


@pytest.fixture
def runs_of_256_classes(monkeypatch):
    """Let what is not kept of an exact loss go through runs of 256 classes."""
    monkeypatch.setattr(all_classes, "RUN_SCORES", {"cpu": 1, "cuda": 1})
