"""The training step that is being watched, or recorded in order to be replayed.

A replay repeats the work of the device and none of the Python. So while a step is recorded, the parts of it that count
steps, measure or decide do nothing, and the code that replays it does that work instead.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class RecordedHead:
    """A head in a recorded step.

    Args:
        head: the head.
        compiled: whether its loss is computed by compiled code.
        draws: the number of its losses in a step.
    """

    head: Any
    compiled: bool
    draws: int = 0


class Recording:
    """The parts of a step that its replay must know, as they report themselves.

    Attributes:
        heads: the heads whose loss was computed, by their identity.
        generators: the generators that draws were made with.
        is_watched: True while the step runs as usual and its parts only report themselves; False while it is recorded.
    """

    def __init__(self) -> None:
        self.heads: dict[int, RecordedHead] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.is_watched = True

    def add_head(self, head: Any, *, compiled: bool) -> None:
        """Report the loss of a head."""
        self.heads.setdefault(id(head), RecordedHead(head, compiled)).draws += 1

    def add_generator(self, generator: torch.Generator | None) -> None:
        """Report the generator of a draw; None: the global one."""
        if generator is not None:
            self.generators[id(generator)] = generator

    @contextlib.contextmanager
    def on(self, *, watched: bool) -> Iterator[None]:
        """Let the parts of the steps in this block report to this recording."""
        # A global variable, not one of the context: a backward pass runs in another thread.
        global _present
        outer, _present, self.is_watched = _present, self, watched
        for recorded in self.heads.values():
            recorded.draws = 0
        try:
            yield
        finally:
            _present = outer


_present: Recording | None = None


def present() -> Recording | None:
    """Return the recording that the parts of a step report to; None outside of one."""
    return _present


def is_recorded() -> bool:
    """Return True in a step that is recorded, where nothing may be measured, counted or read."""
    # A compiled graph is made once, and must not depend on it.
    return not torch.compiler.is_compiling() and _present is not None and not _present.is_watched
