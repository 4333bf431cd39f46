"""Ctrl-C between steps, not within one."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed. Pressed a second time, it raises KeyboardInterrupt at once.

    Half a step cannot be resumed, so the first one waits. Outside the main thread, and where the application has a
    handler of its own, nothing is changed.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
