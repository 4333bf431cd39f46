"""Writes a report: the page, and every figure as PNG and SVG."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from manyclass.report import page, static
from manyclass.report.content import Report


@dataclass(frozen=True)
class WrittenReport:
    """Paths of the page and of the figures."""

    page: Path
    pictures: tuple[Path, ...]


def check_libraries() -> None:
    """Check, before any work is done, that the plotting libraries are installed.

    Raises:
        ImportError: matplotlib or plotly is not installed.
    """
    missing = [name for name in ("matplotlib", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"a report needs {' and '.join(missing)}: pip install 'manyclass[report]'")


def write_report(report: Report, folder: Path) -> WrittenReport:
    """Write `report.html`, figures/NAME.svg and figures/NAME.png into a folder, and overwrite an earlier report.

    Args:
        report: the report.
        folder: the folder, created if it does not exist.

    Raises:
        ImportError: matplotlib or plotly is not installed.
    """
    check_libraries()
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    colours = report.colours()
    drawn = [path for figure in report.figures() for path in static.draw(figure, colours[figure.name], pictures)]
    path = folder / "report.html"
    # Imported here because it imports torch, which drawing does not need.
    from manyclass.storage import atomic_write

    with atomic_write(path, follow_links=False) as temporary:
        temporary.write_text(page.render_page(report), encoding="utf-8")
    return WrittenReport(path, tuple(drawn))
