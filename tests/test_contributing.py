"""The table of features in CONTRIBUTING names every test file, and all files in it exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "manyclass"
ROWS = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[1:]


def files(cell, *folders):
    """Return the files of each name in a cell; a name without a folder is in the folder of the name before it."""
    found = {}
    for name in re.findall(r"`([\w./]+)`", cell):
        if "/" in name or name.endswith((".py", ".md")):
            pattern = re.sub("NAME|TYPE", "*", name).rstrip("/")
            found[name] = [path for folder in folders for path in folder.glob(pattern)]
            folders = (*folders, *(path.parent for path in found[name][:1]))
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_file_in_the_table_exists(row):
    _, source, tests = row
    for name, paths in {**files(source, SOURCE, ROOT), **files(tests, ROOT)}.items():
        assert paths, name


def test_every_test_file_is_in_the_table():
    named = {path for row in ROWS for paths in files(row[2], ROOT).values() for path in paths}
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert path in named or path.parent in named, path
