"""The outcome of a part of the soak."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Counts of cases and events, and the faults found.

    Args:
        cases: the number of cases.
        seen: the number of times that each event was seen.
        faults: one line each.
    """

    cases: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def saw(self, event: str) -> None:
        """Count an event."""
        self.seen[event] = self.seen.get(event, 0) + 1

    def add(self, case: str, faults: Iterable[str]) -> None:
        """Count a case, and add its faults."""
        self.cases += 1
        self.faults += [f"{case}: {fault}" for fault in faults if fault]
