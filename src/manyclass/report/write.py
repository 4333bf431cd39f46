"""Writing a report: the page, and each figure as a picture beside it."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from manyclass.report import page, static
from manyclass.report.content import Report


@dataclass(frozen=True)
class Written:
    """Where a report lies."""

    page: Path
    pictures: tuple[Path, ...]


def check_libraries() -> None:
    """Raise, before any work is done, if what draws is not installed.

    Raises:
        ImportError: matplotlib or plotly is missing.
    """
    missing = [name for name in ("matplotlib", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"a report needs {' and '.join(missing)}: pip install 'manyclass[report]'")


def write_report(report: Report, folder: Path) -> Written:
    """Write `report.html`, and figures/NAME.svg and .png, into a folder, over what an earlier report left there.

    Args:
        report: what to write.
        folder: where to; made if it is not there.

    Raises:
        ImportError: matplotlib or plotly is missing.
    """
    check_libraries()
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    colours = report.colours()
    drawn = [path for figure in report.figures() for path in static.draw(figure, colours[figure.name], pictures)]
    path = folder / "report.html"
    # Imported here because it imports torch, which drawing does not need.
    from manyclass.storage import atomic_write

    with atomic_write(path) as temporary:
        temporary.write_text(page.render(report), encoding="utf-8")
    return Written(path, tuple(drawn))
