"""The Python of a head's training step, for code that replays the work of the device."""

from manyclass.heads._learning import LearningHead, advance, probe_of
from manyclass.heads._probe import estimates_log_z
from manyclass.samplers import ErrorProbe, replayable


def refusal(head: LearningHead) -> str | None:
    """Return the reason why no step of a head can be replayed; None if there is none."""
    if head.shard is not None:
        return "the classes of its head are divided among processes"
    try:
        replayable(head.sampler)
    except TypeError:
        return f"{type(head.sampler).__name__} draws in Python"
    return None


def is_settled(head: LearningHead, draws: int) -> bool:
    """Return True if the next training steps of a head, all in one recorded step, measure, build and decide nothing."""
    if not head.training:
        return True
    return not any(probe.is_due(draws) for probe in _probes(head)) and replayable(head.sampler).is_settled(draws)


def begin(head: LearningHead, draws: int, *, compiled: bool) -> tuple[object, ...]:
    """Count training steps in a head, and return the objects that its recorded draws must have read.

    Args:
        head: the head.
        draws: the number of its losses in the recorded step.
        compiled: whether they are computed by compiled code.
    """
    for _ in range(draws if head.training else 0):
        advance(head)
    return replayable(head.sampler).pinned(compiled=compiled)


def end(head: LearningHead, draws: int) -> None:
    """Count training steps in the probes of a head, none of which is due."""
    for _ in range(draws if head.training else 0):
        for probe in _probes(head):
            probe.count_step()


def _probes(head: LearningHead) -> list[ErrorProbe]:
    return [probe_of(head), *head.extra_probes] if estimates_log_z(head.objective) else []
