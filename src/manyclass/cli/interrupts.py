"""Ctrl-C and SIGTERM."""

import atexit
import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def _can_be_interrupted() -> bool:
    """Return True if Ctrl-C can arrive: in the main thread, unless SIGINT is ignored, as in a script's background."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)


@contextmanager
def uninterrupted(*, ignore: bool = False) -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, or ignore it: half an import or half a message would look like a bug."""
    if not _can_be_interrupted():
        yield
        return
    pressed: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and not ignore:
        raise KeyboardInterrupt


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM, which schedulers and containers send, as Ctrl-C, even if Ctrl-C is ignored."""

    def end(*_: object) -> None:
        if not _can_be_interrupted():
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@functools.cache
def end_quietly() -> None:
    """Ignore Ctrl-C while Python shuts down, where it would print a traceback."""
    # Shutdown starts by joining threads; this hook runs before that, where Python has it.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(signal.signal, signal.SIGINT, signal.SIG_IGN)
