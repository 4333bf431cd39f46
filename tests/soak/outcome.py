"""What a part of the soak found."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """How many cases there were, what each was, and what was wrong.

    Args:
        cases: how many.
        seen: how often something worth telling was.
        faults: a line each.
    """

    cases: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def saw(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def add(self, case: str, faults: Iterable[str]) -> None:
        """A case, and what was wrong with it."""
        self.cases += 1
        self.faults += [f"{case}: {fault}" for fault in faults if fault]
