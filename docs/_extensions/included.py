"""Changes what cannot be shown in pages that include files of the repository."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

GRAPH = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
EDGES = re.compile(r"^\s*(\w+) --> (.*)$", re.MULTILINE)
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)\s#]+)")


def change(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Show a graph of imports as a table, and resolve links relative to the file that is included."""
    folder = (Path(app.srcdir) / path).resolve().parent
    text = GRAPH.sub(_as_table, content[0])
    content[0] = LINK.sub(lambda found: found[1] + _target(app, folder, found[2]), text)


def _as_table(found: re.Match[str]) -> str:
    rows = [
        f"| `{room}` | {', '.join(f'`{name}`' for name in imported.split(' & '))} |"
        for room, imported in EDGES.findall(found[1])
    ]
    return "\n".join(["| room | imports |", "|---|---|", *rows])


def _target(app: Sphinx, folder: Path, name: str) -> str:
    """Return the page that shows a file, or the path of the file from the documentation's folder."""
    path = folder / name
    pages: dict[str, str] = app.config.pages_of_files
    root = Path(app.srcdir).parent
    page = pages.get(str(path.resolve().relative_to(root)))
    return page or os.path.relpath(path, app.srcdir)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the extension."""
    app.add_config_value("pages_of_files", {}, "env")
    app.connect("include-read", change)
    return {"parallel_read_safe": True}
