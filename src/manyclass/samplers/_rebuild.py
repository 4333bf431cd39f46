"""Rebuilds of tables, clusters and indexes on a background thread."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from manyclass._context import isolated
from manyclass._plain_state import has_values, saved_progress


class Built(Protocol):
    """The result of a build: an object that never changes."""

    @property
    def device(self) -> torch.device: ...

    def to(self, device: torch.device) -> Self: ...


M = TypeVar("M", bound=Built)


class BackgroundRebuild(Generic[M]):
    """A schedule that rebuilds a table, clusters or an index every few steps on a background thread.

    A build starts every few steps, from a snapshot; its result is used `lag` steps later, and the step waits if it is
    not finished by then. So a run does not depend on the speed of the thread. On a GPU the build has a separate stream.
    Saving, copying or pickling the state waits for a build in progress, which is part of the state.
    """

    def __init__(self) -> None:
        self._vectors: tuple[Tensor, ...] = ()
        self.steps = 0
        # True until the first build from attached vectors.
        self.stale = True
        self._running: _Running[M] | None = None
        self._finished: M | None = None
        # Discarded, but perhaps not finished.
        self._dropped: _Running[M] | None = None

    def attach(self, *vectors: Tensor) -> None:
        """Build from these class vectors from now on; vectors of another shape start the schedule again."""
        if self._vectors and [x.shape for x in vectors] != [x.shape for x in self._vectors]:
            self.restart()
        self._vectors = vectors

    @property
    def is_attached(self) -> bool:
        """True if class vectors are attached, with or without values."""
        # Not bool(): torch 2.11 cannot compile it.
        return len(self._vectors) > 0

    @property
    def attached(self) -> tuple[Tensor, ...]:
        """The attached class vectors, and biases if any, with or without values."""
        return self._vectors

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The attached class vectors, and biases if any; none while they have no values."""
        return self._vectors if all(map(has_values, self._vectors)) else ()

    def advance(self, current: M, every: int, snapshot: Callable[[], Callable[[], M]]) -> M:
        """Count a step and return the object to draw from after it: the current one or its successor.

        Args:
            current: the object drawn from so far.
            every: steps between two builds.
            snapshot: copies the inputs of a build and returns the function that builds from them on the thread.
        """
        self.steps += 1
        if self.steps % every == lag(every) % every:
            current = self._take(current)
        if self.steps % every == 0:
            with isolated():
                # Processes that divide the classes exchange numbers in a build: two at once would mix them up.
                self._running = _Running(_after(self._dropped, snapshot()), current.device)
                self._dropped = None
        return current

    def is_settled(self, every: int, steps: int) -> bool:
        """Return True if none of the next steps but the first starts a build or takes up its result."""
        later = range(self.steps + 2, self.steps + steps + 1)
        return not any(step % every in (0, lag(every) % every) for step in later)

    def drop(self) -> None:
        """Discard the build in progress."""
        self._dropped = self._running or self._dropped
        self._running = self._finished = None

    def restart(self) -> None:
        """Discard the build in progress and the class vectors, and count steps from 0."""
        self.drop()
        self._vectors, self.steps, self.stale = (), 0, True

    def pending(self) -> M | None:
        """Return the result of the build in progress, which is not yet in use; wait until it has finished."""
        return self._finished if self._running is None else self._running.result()

    def _take(self, current: M) -> M:
        pending = self.pending()
        self.drop()
        return current if pending is None else pending.to(current.device)

    def __getstate__(self) -> dict[str, Any]:
        # A thread cannot be copied, its result can; nor can vectors without values, which are attached again.
        return {
            **self.__dict__,
            "_running": None,
            "_finished": self.pending(),
            "_dropped": None,
            "_vectors": self.vectors,
        }

    @property
    def progress(self) -> Tensor:
        """int64 [2]: the number of steps, which decides when the next build starts, and staleness."""
        return torch.tensor([self.steps, self.stale], device="cpu")

    def restore(self, progress: Tensor, pending: M | None) -> None:
        """Continue from a saved number of steps, staleness and build; raise ValueError if they are invalid."""
        steps, stale = saved_progress(progress)
        self.drop()
        self.steps, self.stale, self._finished = steps, stale, pending


def default_interval(num_classes: int) -> int:
    """Return the steps between two builds that cluster all class vectors."""
    return max(500, num_classes // 64)


def lag(every: int) -> int:
    """Return the steps between the snapshot of a build and its use: enough for a thread that shares the machine."""
    return -(-every // 4)


class _Running(Generic[M]):
    """A build on a thread, on a GPU with a separate stream."""

    def __init__(self, build: Callable[[], M], device: torch.device) -> None:
        self._process = os.getpid()
        self._build: Callable[[], M] | None = build
        stream = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
        executor = ThreadPoolExecutor(1, "manyclass-rebuild")
        self._future: Future[M] = executor.submit(_work, build, stream)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the build has ended, in the process that has its thread."""
        if os.getpid() == self._process:
            self._future.exception()

    def result(self) -> M:
        """Return the result; wait for it."""
        if self._build is not None and os.getpid() != self._process:
            # Threads do not survive a fork. The inputs do, and the same inputs give the same result.
            build = self._build
            self._future, self._build = Future(), None
            try:
                self._future.set_result(_work(build, None))
            except Exception as error:
                self._future.set_exception(error)
        return self._future.result()


def _after(dropped: "_Running[M] | None", build: Callable[[], M]) -> Callable[[], M]:
    """Return a build that waits for one that was discarded."""

    def wait_and_build() -> M:
        if dropped is not None:
            dropped.wait()
        return build()

    return wait_and_build


def _work(build: Callable[[], M], stream: torch.cuda.Stream | None) -> M:
    with isolated(), torch.cuda.stream(stream):
        try:
            return build()
        finally:
            if stream is not None:
                # Then the result may be used in any stream, and the memory of the snapshot reused.
                stream.synchronize()
