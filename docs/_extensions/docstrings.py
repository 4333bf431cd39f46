"""Shows docstrings, which are plain text with code between backticks, as they are written."""

import re
from typing import Any

from sphinx.application import Sphinx

INDENTED = re.compile(r" {4}\S")
SECTION = re.compile(r"\w[\w ]*:$")
CODE = re.compile(r"(`[^`]*`)")
MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")
# A letter with a full stop, such as "C.", would begin a list.
LETTER = re.compile(r"(^\s*|: )([A-Za-z])\.(?=\s|$)")
WITHOUT_SECTIONS = ("attribute", "data", "property")
OF_SCIKIT_LEARN = re.compile(r"set_\w+_request$")

Lines = list[str]


class Docstrings:
    """Handlers of the events of autodoc."""

    def __init__(self) -> None:
        self._plain: dict[str, Lines] = {}

    def before(self, app: Sphinx, what: str, name: str, obj: object, options: Any, lines: Lines) -> None:
        """Escape what is no markup, and mark the equations, which are indented paragraphs, as literal blocks."""
        found: Lines = []
        in_section = False
        for number, line in enumerate(lines):
            in_section = in_section or bool(SECTION.match(line))
            if not in_section and INDENTED.match(line):
                if number and not lines[number - 1].strip():
                    found += ["::", ""]
                found.append(line)
            else:
                found.append(line if line.lstrip().startswith((">>>", "...")) else _escaped(line))
        lines[:] = found
        if what in WITHOUT_SECTIONS:
            self._plain[name] = found

    def after(self, app: Sphinx, what: str, name: str, obj: object, options: Any, lines: Lines) -> None:
        """Undo what napoleon does to one sentence with a colon: it takes the beginning for a type."""
        if what in WITHOUT_SECTIONS:
            lines[:] = self._plain[name]


def _escaped(line: str) -> str:
    parts = CODE.split(LETTER.sub(r"\1\2\\.", line))
    return "".join(part if part.startswith("`") else MARKUP.sub(r"\\\g<0>", part) for part in parts)


def skip(app: Sphinx, what: str, name: str, obj: object, skipped: bool, options: Any) -> bool | None:
    """Leave out the methods that scikit-learn adds to estimators."""
    return True if OF_SCIKIT_LEARN.match(name) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the extension."""
    docstrings = Docstrings()
    # Napoleon, which rewrites sections, has the priority 500.
    app.connect("autodoc-process-docstring", docstrings.before, priority=100)
    app.connect("autodoc-process-docstring", docstrings.after, priority=900)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
