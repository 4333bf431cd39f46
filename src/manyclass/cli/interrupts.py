"""Ctrl-C and SIGTERM."""

import atexit
import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def _interrupting() -> list[signal.Signals]:
    """Return the signals that can interrupt now: none outside the main thread, no SIGINT in a script's background."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]


@contextmanager
def uninterrupted(*, ignore: bool = False) -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, or ignore it: half an import or half a message would look like a bug."""
    pressed: list[bool] = []
    before = {number: signal.signal(number, lambda *_: pressed.append(True)) for number in _interrupting()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pressed and not ignore:
        raise KeyboardInterrupt


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM, which schedulers and containers send, as Ctrl-C, even if Ctrl-C is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A training defers the signals of this handler to the end of a step.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
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
