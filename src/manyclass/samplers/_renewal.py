"""What samplers draw from, built anew beside the steps."""

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from manyclass import storage

M = TypeVar("M", bound=nn.Module)


class Renewal(nn.Module, Generic[M]):
    """Has a table, clusters or an index built anew every so many steps, on a thread beside them.

    A build begins at some step, from a snapshot; what it gives is taken up `lag` steps later, and waited for if it is
    not done by then. So a run is the same however fast the thread is, and on a GPU the build has a stream of its own.
    What is under way when the state is saved, copied or pickled is waited for, and is part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._begun: Future[M] | None = None
        self._loaded: dict[str, Any] | None = None

    def step(self, current: M, every: int, snapshot: Callable[[], Callable[[], M]]) -> M:
        """Count a step, and say what to draw from after it: the current module or its successor.

        Args:
            current: what was drawn from so far.
            every: steps between two builds.
            snapshot: copies what a build needs, and gives the function that builds from it on the thread.
        """
        self.steps += 1
        if self.steps % every == lag(every) % every:
            current = self._take(current)
        if self.steps % every == 0:
            self._begun = _beside(snapshot(), next(current.buffers()).device)
        return current

    def drop(self) -> None:
        """Forget what is under way."""
        self._begun = self._loaded = None

    def restart(self) -> None:
        """Begin to count anew."""
        self.drop()
        self.steps = 0

    def _take(self, current: M) -> M:
        begun, loaded = self._begun, self._loaded
        self.drop()
        if begun is not None:
            return begun.result().to(next(current.buffers()).device)
        if loaded is not None:
            current = copy.deepcopy(current)
            current.load_state_dict(loaded)
        return current

    def _under_way(self) -> dict[str, Any] | None:
        return self._loaded if self._begun is None else self._begun.result().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        # A thread cannot be copied; what it gives can.
        return {**self.__dict__, "_begun": None, "_loaded": self._under_way()}

    def get_extra_state(self) -> Tensor:
        """How many steps there were, from which follows when the next build begins; and what is under way."""
        return storage.to_tensor({"steps": self.steps, "under way": self._under_way()})

    def set_extra_state(self, state: Tensor) -> None:
        held = storage.from_tensor(state)
        self.steps, self._begun, self._loaded = int(held["steps"]), None, held["under way"]


def lag(every: int) -> int:
    """Steps between the snapshot of a build and its taking up: long enough for a thread that shares the machine."""
    return -(-every // 4)


def _beside(build: Callable[[], M], device: torch.device) -> Future[M]:
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
                    # Whoever has the result may use it in any stream, and the snapshot's memory may be used again.
                    stream.synchronize()

    executor = ThreadPoolExecutor(1, "manyclass-renewal")
    begun = executor.submit(work)
    executor.shutdown(wait=False)
    return begun
