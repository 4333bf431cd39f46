"""The Python of a head's training steps, for code that replays the work of the device."""

from manyclass._recording import RecordedHead
from manyclass.heads._learning import LearningHead, attach_current, probe_of
from manyclass.heads._probe import estimates_log_z
from manyclass.samplers import ErrorProbe, ReplayableSampler, replayable


class HeadReplay:
    """A head in a recorded step.

    Each replay takes time from the device, so what does not change is looked up once.

    Args:
        recorded: the head, and how often the step computes its loss.
    """

    def __init__(self, recorded: RecordedHead) -> None:
        self._head: LearningHead = recorded.head
        self._compiled, self._draws = recorded.compiled, recorded.draws
        self._sampler: ReplayableSampler | None = None
        self._vectors: tuple[object, ...] = ()
        self._probes: list[ErrorProbe] = []

    def refusal(self) -> str | None:
        """Return the reason why no step of the head can be replayed; None if there is none."""
        if self._head.shard is not None:
            return "the classes of its head are divided among processes"
        try:
            replayable(self._head.sampler)
        except TypeError:
            return f"{type(self._head.sampler).__name__} draws in Python"
        return None

    def is_settled(self) -> bool:
        """Return True if the step measures, builds and decides nothing."""
        head = self._head
        if not head.training:
            return True
        sampler = head.sampler
        if sampler is not self._sampler:
            self._sampler, self._vectors = replayable(sampler), ()
            self._probes = [probe_of(head)] if estimates_log_z(head.objective) else []
        draws = self._draws
        if any(probe.is_due(draws) for probe in self._probes):
            return False
        if self._probes and any(probe.is_due(draws) for probe in head.extra_probes):
            return False
        return self._sampler.is_settled(draws)

    def begin(self) -> tuple[object, ...]:
        """Count the steps in the sampler, and return the objects that the recorded draws must have read."""
        head = self._head
        sampler = replayable(head.sampler)
        if head.training:
            vectors = head.class_vectors
            if any(a is not b for a, b in zip(vectors, self._vectors or (self, self), strict=True)):
                attach_current(head)
                self._vectors = vectors
            for _ in range(self._draws):
                sampler.advance()
        return sampler.pinned(compiled=self._compiled)

    def end(self) -> None:
        """Count the steps in the probes, none of which is due."""
        if not self._head.training:
            return
        extra = self._head.extra_probes if self._probes else []
        for _ in range(self._draws):
            for probe in (*self._probes, *extra):
                probe.count_step()
