"""Every block of Python in the README and the documentation runs, but for a few that are listed here."""

import contextlib
import importlib.util
import os

import pytest

from tests.docs.markdown import PAGES, fences, name

PYTHON = ("python", "{code-cell} ipython3")
OTHERS = ("console", "text", "{toctree}", "{include}", "{image}", "{raw} html", "")
# Replacements that make a page short enough for a test.
SMALLER = {"docs/quickstart.md": [("range(600)", "range(8)")]}
NEEDS = {
    "README.md": ("transformers",),
    "docs/integrations.md": ("transformers", "accelerate", "lightning"),
    "docs/inference.md": ("faiss",),
}
NOT_RUN = {
    "docs/integrations.md": 1,
    "docs/moving.md": 3,
    "docs/scale.md": 1,
}


def blocks(path):
    return [fence for fence in fences(path) if fence.language in PYTHON]


WITH_CODE = [path for path in PAGES if any(block.not_run is None for block in blocks(path))]


# Trainers warn about machines without a GPU, about loaders without workers, and about torch.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument", "ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_the_python_of_a_page_runs(path, tmp_path, monkeypatch):
    for library in NEEDS.get(name(path), ()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    replaced = set()
    # The blocks of a page are one program.
    names = {"__name__": "page"}
    for block in blocks(path):
        if block.not_run is not None:
            continue
        text = block.text
        for before, after in SMALLER.get(name(path), ()):
            replaced |= {before} if before in text else set()
            text = text.replace(before, after)
        code = compile("\n" * (block.line - 1) + text, path, "exec")
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            exec(code, names)
    assert replaced == {before for before, _ in SMALLER.get(name(path), ())}


def test_the_blocks_that_do_not_run_are_known():
    found = {name(path): sum(block.not_run is not None for block in blocks(path)) for path in PAGES}
    assert {page: number for page, number in found.items() if number} == NOT_RUN


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_block_has_a_known_language(path):
    for fence in fences(path):
        language = fence.language.split(" ../")[0]
        assert language in (*PYTHON, *OTHERS), f"{name(path)}:{fence.line}: {fence.language}"
        if language == "":
            # Without a language there may be commands, never Python, which would not be run.
            assert "import " not in fence.text, f"{name(path)}:{fence.line}"
