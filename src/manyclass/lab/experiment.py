"""What an experiment is given, and what it finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyclass.lab.cells import Compute, Settings
from manyclass.lab.work import Work
from manyclass.report import Section


@dataclass(frozen=True)
class Claim:
    """What a paper says, beside what was measured.

    Args:
        id: its short name.
        statement: what the paper says.
        measured: what was measured, with its spread over seeds.
        holds: whether the data bears it out.
        reason: where it does not, why we think so.
    """

    id: str
    statement: str
    measured: str
    holds: bool
    reason: str = ""


@dataclass(frozen=True)
class Findings:
    """What an experiment found.

    Args:
        section: of the report.
        claims: that its data decides.
        rows: everything measured, as the rows of a table.
    """

    section: Section
    claims: tuple[Claim, ...]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """How much work to do.

    Args:
        seeds: how many problems.
        iterations: of training in the paper's two figures.
        short: of training elsewhere.
        sweep_seeds: on how many of the problems learning rates are chosen.
        draws: of a sampler, where an expectation is simulated.
    """

    seeds: int
    iterations: int
    short: int
    sweep_seeds: int
    draws: int

    @staticmethod
    def points(iterations: int) -> list[int]:
        """Where a curve is measured: every 20 iterations while most is learnt, every 100 then, and at the end."""
        early = range(0, min(iterations, 200) + 1, 20)
        return sorted({*early, *range(200, iterations + 1, 100), iterations})


@dataclass(frozen=True)
class Lab:
    """Where experiments run: their scale, their seeds, and what computes for them.

    Args:
        scale, seed: how many problems, and the number of the first.
        work: what computes.
    """

    scale: Scale
    seed: int
    work: Work

    @property
    def seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.scale.seeds))

    @property
    def sweep_seeds(self) -> list[int]:
        return self.seeds[: self.scale.sweep_seeds]

    def map(self, compute: Compute, settings: Sequence[Settings]) -> list[dict[str, Any]]:
        """The results of a function for each of some settings, in order."""
        return self.work.map(compute, settings)


Run = Callable[[Lab], Findings]
