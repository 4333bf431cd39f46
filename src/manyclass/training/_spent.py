"""Where the time goes."""

import time
from collections.abc import Mapping


class Spent:
    """Seconds by what they were spent on.

    Args:
        seconds: those of before.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self._since = time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def start(self) -> None:
        """What was before is nothing's."""
        self._since = time.perf_counter()

    def on(self, name: str) -> None:
        """The time since the last call was spent on this."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
