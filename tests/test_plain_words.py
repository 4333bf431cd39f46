"""Docstrings, comments, messages and documentation keep to plain words."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
OPENINGS = ("What", "How", "Where", "Whether", "Which", "Who")
BANNED = (
    "whoever",
    "nobody",
    "somebody",
    "lest",
    "anew",
    "so many",
    "now and then",
    "for as long",
    "is none of",
    "of its own",
    "of their own",
)
# "who" is also a word of data and of tests on it, so strings other than docstrings may hold it.
BANNED_IN_COMMENTS = ("who",)
BANNED_IN_RAISES = ("it would",)


def pattern(words):
    # A phrase may be broken over two lines, with the mark of a comment between.
    phrases = "|".join(word.replace(" ", r"[\s#/*]+") for word in words)
    return re.compile(rf"\b(?:{phrases})\b", re.IGNORECASE)


def python_texts(source):
    """Yield the first line, the text and the place of each comment, docstring and other string."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
    }
    # Comments in a row are one text.
    start, comment, last = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield start, comment, "comment"
                start, comment = token.start[0], ""
            comment, last = f"{comment}\n{token.string}".lstrip("\n"), token.start[0]
        elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string, "docstring" if token.start[0] in docstrings else "string"
    yield start, comment, "comment"


def other_texts(source):
    """Yield the first line, the text and the place of each comment of C++, JavaScript or CSS, and of each string."""
    for found in re.finditer(r'//[^\n]*(?:\n\s*//[^\n]*)*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', source, re.DOTALL):
        place = "string" if found[0].startswith('"') else "comment"
        yield source.count("\n", 0, found.start()) + 1, found[0], place


def texts(path):
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [(1, source, "document")]
    return list(python_texts(source) if path.suffix == ".py" else other_texts(source))


def faults(text, place):
    """Yield the offset and the description of each fault in a text."""
    for found in pattern(BANNED).finditer(text):
        yield found.start(), f"{' '.join(found[0].split())!r}"
    if place in ("comment", "docstring"):
        for found in pattern(BANNED_IN_COMMENTS).finditer(text):
            yield found.start(), f"{found[0]!r} in a {place}"
    if place == "docstring":
        opening = re.match(rf'[rRuU]*["\']+\s*({"|".join(OPENINGS)})\b', text)
        if opening:
            yield 0, f"a docstring that opens with {opening[1]!r}"
        for section in re.finditer(r"\n *Raises:\n.*?(?=\n\n|\Z)", text, re.DOTALL):
            for found in pattern(BANNED_IN_RAISES).finditer(section[0]):
                yield section.start() + found.start(), f"{found[0]!r} in a Raises section"


def paths():
    for folder in FOLDERS:
        for suffix in ("py", "cpp", "js", "css"):
            yield from (ROOT / folder).rglob(f"*.{suffix}")
    yield from (ROOT / name for name in DOCUMENTS if (ROOT / name).exists())
    yield from (path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)


def test_texts_use_plain_words():
    found = [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, offset)}: {fault}"
        for path in sorted(set(paths()) - {Path(__file__)})
        for line, text, place in texts(path)
        for offset, fault in faults(text, place)
    ]
    assert not found, "\n" + "\n".join(found)


def test_each_fault_is_found():
    source = '''"""What it is.

Raises:
    ValueError: it would fail.
"""
# A thread of
# its own.
name = f"nobody {1}"  # For those who ask.
'''
    found = [fault for _, text, place in python_texts(source) for _, fault in faults(text, place)]
    assert len(found) == 5
    assert (
        len(
            [
                fault
                for _, text, place in other_texts("// Built anew.\n/* so\n * many */")
                for fault in faults(text, place)
            ]
        )
        == 2
    )
