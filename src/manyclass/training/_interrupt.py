"""Ctrl-C between steps, not within one."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

MOMENT = 1.0  # seconds


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed. Pressed again later, it raises KeyboardInterrupt at once.

    Half a step cannot be resumed, nor half a checkpoint, so the first one waits; who presses twice in a moment means
    the same. Outside the main thread, and where the application has a handler of its own, nothing is changed.
    """
    pressed: float | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        now = time.monotonic()
        if pressed is not None and now - pressed > MOMENT:
            raise KeyboardInterrupt
        pressed = now if pressed is None else pressed

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed is not None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
