"""Ctrl-C, and a scheduler's or container's wish that this should end."""

import atexit
import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def _can_be_pressed() -> bool:
    """Not so in other threads, and in the background of a script, where it is ignored."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)


@contextmanager
def uninterrupted(*, forget: bool = False) -> Iterator[None]:
    """Ctrl-C waits, or is forgotten: half an import is an error of the library's own, and half an answer none."""
    if not _can_be_pressed():
        yield
        return
    pressed: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and not forget:
        raise KeyboardInterrupt


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, also where that is ignored."""

    def end(*_: object) -> None:
        if not _can_be_pressed():
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
    """Ignore Ctrl-C when all is done and said: Python takes its time to end, and it would be a traceback."""
    # What comes first then is that threads are waited for.
    first = getattr(threading, "_register_atexit", atexit.register)
    first(signal.signal, signal.SIGINT, signal.SIG_IGN)
