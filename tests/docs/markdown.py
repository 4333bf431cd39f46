"""The blocks, commands and links of Markdown pages."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages that are shown; those in docs/examples are run by tests/test_docs_examples.py.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "api" / "index.md"]
INCLUDED = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]

_NOT_RUN = re.compile(r"<!-- not run: (.*) -->")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,4} (.*)$")
_TARGET = re.compile(r"^\(([\w-]+)\)=$")


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Args:
        line: the number of its first line, from 1.
        language: the word after the fence; "" if there is none.
        text: the lines between.
        not_run: the reason why it is only shown, if the line above gives one.
    """

    line: int
    language: str
    text: str
    not_run: str | None


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path) -> list[Fence]:
    """Return the fenced blocks of a page."""
    found, lines = [], path.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start = number
        elif start is not None and line.rstrip() == "```":
            above = _NOT_RUN.fullmatch(lines[start - 1].strip()) if start else None
            text = "\n".join(lines[start + 1 : number]) + "\n"
            found.append(Fence(start + 2, lines[start][3:].strip(), text, above and above[1]))
            start = None
    assert start is None, f"{name(path)}: a block does not end"
    return found


def prose(path: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def inline_code(path: Path) -> list[str]:
    """Return the text of each code span."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(path))]


def links(path: Path) -> list[str]:
    """Return the targets of links."""
    return _LINK.findall(re.sub(r"`[^`]*`", "", prose(path)))


def anchors(path: Path) -> set[str]:
    """Return the anchors of headings, as GitHub and MyST make them, and the targets that a page names."""
    found = set()
    for line in prose(path).splitlines():
        if heading := _HEADING.match(line):
            plain = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found.add(plain.replace(" ", "-"))
        elif target := _TARGET.match(line):
            found.add(target[1])
    return found
