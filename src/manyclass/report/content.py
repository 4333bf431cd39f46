"""What a report is made of, before anything is drawn."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True)
class Curve:
    """A line, or points, through numbers; those that are not finite leave a gap.

    Args:
        label: its name in the legend. Curves of one label have one colour in a figure, and in others if they can.
        x, y: of equal length.
        low, high: a band around y, or None.
        dashed: whether the line is dashed, as a theory's or a bound's is.
        points: whether the points are marked.
        like: another curve's label, whose colour it takes.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    points: bool = False
    like: str | None = None

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.x):
                raise ValueError(f"`{name}` of {self.label!r} must have length {len(self.x)}, got {len(values)}")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"`low` and `high` of {self.label!r} must be given together, got one of them")


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels side by side with one legend.

    Args:
        name: of its files, in letters, digits and hyphens.
        caption: what to see in it.
        panels: from left to right.
    """

    name: str
    caption: str
    panels: Sequence[Panel]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]+", self.name):
            raise ValueError(f"`name` must be of lower-case letters, digits and hyphens, got {self.name!r}")


@dataclass(frozen=True)
class Table:
    """Rows of text under headings.

    Args:
        columns: the headings.
        rows: one text for each column.
        caption: what it shows.
        tones: for each row whether its last cell is good or bad news; None: neither.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    tones: Sequence[Tone] | None = None

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"`rows` must have {len(self.columns)} cells each, got {len(row)} at position {i}")


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it: paragraphs of plain text, figures and tables."""

    title: str
    parts: Sequence[str | Figure | Table]


@dataclass(frozen=True)
class Report:
    """A page.

    Args:
        title, summary: what opens it.
        sections: in order.
        notes: small print at its end: versions, settings, time.
    """

    title: str
    summary: str
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=tuple)

    def figures(self) -> Iterator[Figure]:
        for section in self.sections:
            yield from (part for part in section.parts if isinstance(part, Figure))

    def colours(self) -> dict[str, dict[str, int]]:
        """For each figure, by name, the number of each label's colour.

        A label keeps the colour of its first figure, unless another label of the figure has it already.
        """
        first: dict[str, int] = {}
        found: dict[str, dict[str, int]] = {}
        for figure in self.figures():
            here: dict[str, int] = {}
            labels = dict.fromkeys(curve.like or curve.label for panel in figure.panels for curve in panel.curves)
            for label in labels:
                if label in first and first[label] not in here.values():
                    here[label] = first[label]
            for label in labels:
                if label not in here:
                    here[label] = next(number for number in itertools.count() if number not in here.values())
                    first.setdefault(label, here[label])
            found[figure.name] = here
        return found


def finite(values: Sequence[float]) -> list[float | None]:
    """The numbers with None for those that are not finite, which JSON has no word for."""
    return [float(value) if math.isfinite(value) else None for value in values]
