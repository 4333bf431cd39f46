"""The input of an experiment and its findings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manyclass.lab.cells import Compute, Settings
from manyclass.lab.runner import CellRunner
from manyclass.report import Section


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and the measurement that tests it.

    Args:
        id: a short name.
        statement: the paper's statement.
        measured: the measurement, with its spread over seeds.
        holds: True if the data supports the statement.
        reason: a probable cause if it does not.
    """

    id: str
    statement: str
    measured: str
    holds: bool
    reason: str = ""


@dataclass(frozen=True)
class Findings:
    """Output of an experiment.

    Args:
        section: the experiment's section of the report.
        claims: the statements that its data decides.
        rows: all measurements, as table rows.
    """

    section: Section
    claims: tuple[Claim, ...]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """Amount of work.

    Args:
        seeds: number of random problems.
        iterations: training iterations in the paper's two figures.
        short: training iterations in all other experiments.
        sweep_seeds: number of problems on which learning rates are chosen.
        draws: draws of a sampler per simulated expectation.
    """

    seeds: int
    iterations: int
    short: int
    sweep_seeds: int
    draws: int

    @staticmethod
    def points(iterations: int) -> list[int]:
        """Return the measured iterations: every 20 up to 200, where most is learned, then every 100, and the last."""
        early = range(0, min(iterations, 200) + 1, 20)
        return sorted({*early, *range(200, iterations + 1, 100), iterations})


@dataclass(frozen=True)
class Lab:
    """Scale, first seed and cell runner that all experiments share."""

    scale: Scale
    seed: int
    runner: CellRunner

    @property
    def seeds(self) -> list[int]:
        """Seeds of all problems."""
        return list(range(self.seed, self.seed + self.scale.seeds))

    @property
    def sweep_seeds(self) -> list[int]:
        """Seeds of the problems on which learning rates are chosen."""
        return self.seeds[: self.scale.sweep_seeds]

    def map(self, compute: Compute, settings: Sequence[Settings]) -> list[dict[str, Any]]:
        """Return the function's results in the order of the settings."""
        return self.runner.map(compute, settings)


Experiment = Callable[[Lab], Findings]
