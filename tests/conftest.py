import signal

import pytest

from manyclass.kernels.cpu import build


def pytest_configure():
    # Who runs in the background is not interrupted by Ctrl-C, and tests of that would find nothing to test.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["compiled", "eager"])
def kernels(request, monkeypatch):
    """Runs a test with the compiled kernels and without them."""
    if request.param == "eager":
        monkeypatch.setattr(build, "library", lambda: None)
    elif build.library() is None:
        pytest.skip("no C++ compiler on this machine")
    return request.param
