"""What an experiment is given, and what it finds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from manyclass.lab.cells import Cells, Compute, Settings
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


class Watch(Protocol):
    """Is told how far an experiment is."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


@dataclass
class Lab:
    """Where experiments run: their scale, their seeds, and the cells that compute for them.

    Args:
        scale, seed: how many problems, and the number of the first.
        cells: what computes.
        watch: is told of progress.
    """

    scale: Scale
    seed: int
    cells: Cells
    watch: Watch | None = None
    # Of the experiment under way: its name, and cells done and asked for so far.
    name: str = ""
    done: int = 0
    total: int = 0

    @property
    def seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.scale.seeds))

    @property
    def sweep_seeds(self) -> list[int]:
        return self.seeds[: self.scale.sweep_seeds]

    def begin(self, name: str) -> None:
        self.name, self.done, self.total = name, 0, 0

    def map(self, compute: Compute, settings: Sequence[Settings]) -> list[dict[str, Any]]:
        """The results of a function for each of some settings, in order."""
        before = self.done
        self.total += len(settings)

        def on_done(number: int) -> None:
            self.done = before + number
            if self.watch is not None:
                self.watch(self.name, self.done, self.total)

        return self.cells.map(compute, settings, on_done=on_done)


Run = Callable[[Lab], Findings]
