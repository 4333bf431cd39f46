"""Content of a report, independent of how it is drawn."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True)
class Curve:
    """Line through points; numbers that are not finite leave a gap.

    Args:
        label: name in the legend. Curves of one label share a colour in a figure, and across figures if possible.
        x, y: coordinates, of equal length.
        low, high: a band around y, or None.
        dashed: True for a dashed line, as for a theory or a bound.
        points: True to draw markers at the points.
        colour_of: label of another curve whose colour to use.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False
    points: bool = False
    colour_of: str | None = None

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.x):
                raise ValueError(f"`{name}` of {self.label!r} must have length {len(self.x)}, got {len(values)}")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"`low` and `high` of {self.label!r} must be given together, got one of them")


@dataclass(frozen=True)
class Panel:
    """Pair of axes with its curves."""

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
        name: name of its files, in lower-case letters, digits and hyphens.
        caption: text below the figure.
        panels: panels from left to right.
    """

    name: str
    caption: str
    panels: Sequence[Panel]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]+", self.name):
            raise ValueError(f"`name` must be of lower-case letters, digits and hyphens, got {self.name!r}")


@dataclass(frozen=True)
class ReportTable:
    """Rows of text under headings.

    Args:
        columns: the headings.
        rows: one text per column.
        caption: text below the table.
        tones: for each row "good", "bad" or "plain", the colour of its last cell; None means all plain.
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
    """Heading, and the paragraphs, figures and tables under it."""

    title: str
    parts: Sequence[str | Figure | ReportTable]


@dataclass(frozen=True)
class Report:
    """Page of a report.

    Args:
        title, summary: heading and first paragraph.
        sections: sections in order.
        notes: paragraphs at the end, such as versions, settings and time.
    """

    title: str
    summary: str
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=tuple)

    def figures(self) -> Iterator[Figure]:
        """Yield all figures in order."""
        for section in self.sections:
            yield from (part for part in section.parts if isinstance(part, Figure))

    def colours(self) -> dict[str, dict[str, int]]:
        """Return the colour number of each label, by figure name.

        A label keeps the colour of its first figure, unless another label of the figure already has it.
        """
        first: dict[str, int] = {}
        found: dict[str, dict[str, int]] = {}
        for figure in self.figures():
            here: dict[str, int] = {}
            labels = dict.fromkeys(curve.colour_of or curve.label for panel in figure.panels for curve in panel.curves)
            for label in labels:
                if label in first and first[label] not in here.values():
                    here[label] = first[label]
            for label in labels:
                if label not in here:
                    here[label] = next(number for number in itertools.count() if number not in here.values())
                    first.setdefault(label, here[label])
            found[figure.name] = here
        return found


def finite_or_none(values: Sequence[float]) -> list[float | None]:
    """Replace numbers that are not finite, which JSON cannot represent, by None."""
    return [float(value) if math.isfinite(value) else None for value in values]
