"""Rebuilds of tables, clusters and indexes on a background thread."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from manyclass import storage

M = TypeVar("M", bound=nn.Module)


class BackgroundRebuild(nn.Module, Generic[M]):
    """A schedule that rebuilds a table, clusters or an index every few steps on a background thread.

    A build starts every few steps, from a snapshot; its result is used `lag` steps later, and the step waits if it is
    not finished by then. So a run does not depend on the speed of the thread. On a GPU the build has a separate stream.
    Saving, copying or pickling the state waits for a build in progress, which is part of the state.
    """

    def __init__(self) -> None:
        super().__init__()
        # The attached class vectors, and biases if any. In a tuple: as attributes they would be registered here too.
        self.vectors: tuple[Tensor, ...] = ()
        self.steps = 0
        # True until the first build from newly attached vectors.
        self.stale = True
        self._running: Future[M] | None = None
        self._loaded: dict[str, Any] | None = None

    def advance(self, current: M, every: int, snapshot: Callable[[], Callable[[], M]]) -> M:
        """Count a step and return the module to draw from after it: the current one or its successor.

        Args:
            current: the module drawn from so far.
            every: steps between two builds.
            snapshot: copies the inputs of a build and returns the function that builds from them on the thread.
        """
        self.steps += 1
        if self.steps % every == lag(every) % every:
            current = self._take(current)
        if self.steps % every == 0:
            self._running = _start(snapshot(), next(current.buffers()).device)
        return current

    def drop(self) -> None:
        """Discard the build in progress."""
        self._running = self._loaded = None

    def restart(self, *vectors: Tensor) -> None:
        """Discard the build in progress and count steps from 0, with these class vectors to build from."""
        self.drop()
        self.vectors, self.steps, self.stale = vectors, 0, True

    def _take(self, current: M) -> M:
        running, loaded = self._running, self._loaded
        self.drop()
        if running is not None:
            return running.result().to(next(current.buffers()).device)
        if loaded is not None:
            current = copy.deepcopy(current)
            current.load_state_dict(loaded)
        return current

    def _pending(self) -> dict[str, Any] | None:
        return self._loaded if self._running is None else self._running.result().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        # A thread cannot be copied; its result can.
        return {**self.__dict__, "_running": None, "_loaded": self._pending()}

    def get_extra_state(self) -> Tensor:
        """Return the number of steps, which decides when the next build starts, and the build in progress."""
        return storage.to_tensor({"steps": self.steps, "stale": self.stale, "pending": self._pending()})

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved number of steps and a saved build."""
        held = storage.from_tensor(state)
        self.steps, self.stale = int(held["steps"]), bool(held["stale"])
        self._running, self._loaded = None, held["pending"]


def default_interval(num_classes: int) -> int:
    """Return the steps between two builds that cluster all class vectors."""
    return max(500, num_classes // 64)


def lag(every: int) -> int:
    """Return the steps between the snapshot of a build and its use: enough for a thread that shares the machine."""
    return -(-every // 4)


def _start(build: Callable[[], M], device: torch.device) -> Future[M]:
    """Run a build on a thread."""
    work = build
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

        def work() -> M:
            with torch.cuda.stream(stream):
                try:
                    return build()
                finally:
                    # Then the result may be used in any stream, and the memory of the snapshot reused.
                    stream.synchronize()

    executor = ThreadPoolExecutor(1, "manyclass-rebuild")
    running = executor.submit(work)
    executor.shutdown(wait=False)
    return running
