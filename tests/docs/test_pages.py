"""Links of the pages lead somewhere, every page is in the site, and the API reference has every public name."""

import importlib
import inspect
import re

import pytest

import manyclass
from tests.docs.markdown import INCLUDED, PAGES, ROOT, anchors, fences, inline_code, links, name

DOCS = ROOT / "docs"
# Rooms whose public names are for users; those of other rooms are used by these.
ROOMS = (
    "data",
    "encoders",
    "errors",
    "forms",
    "heads",
    "inference",
    "kernels",
    "objectives",
    "optim",
    "parallel",
    "registry",
    "report",
    "samplers",
    "storage",
    "tasks",
    "training",
)
OPTIONAL = {"transformers": "transformers", "lightning": "lightning", "sentence_transformers": "sentence_transformers"}


@pytest.mark.parametrize("path", [*PAGES, *INCLUDED], ids=name)
def test_links_lead_to_files_and_headings(path):
    for link in links(path):
        if re.match(r"https?://[\w-]+\.[\w.-]+", link):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else path.parent / file
        assert target.exists(), f"{name(path)}: {link}"
        if anchor and target.suffix == ".md":
            included = [fence.language.split()[1] for fence in fences(target) if fence.language.startswith("{include}")]
            known = anchors(target).union(*(anchors((target.parent / file).resolve()) for file in included))
            assert anchor in known, f"{name(path)}: {link}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_parts_of_files_that_a_page_includes_exist(path):
    for fence in fences(path):
        if fence.language.startswith("{include}"):
            text = (path.parent / fence.language.split()[1]).read_text()
            for mark in re.findall(r"^:(?:start-after|end-before): (.*)$", fence.text, re.MULTILINE):
                assert text.count(mark) == 1, f"{name(path)}: {mark}"


def test_every_page_is_in_a_table_of_contents():
    listed = {"index"}
    for page in DOCS.rglob("*.md"):
        folder = page.parent.relative_to(DOCS)
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            listed |= {str(folder / line) for line in block.split("\n") if line and not line.startswith(":")}
    pages = [page for page in DOCS.rglob("*") if page.suffix in (".md", ".rst") and "_build" not in page.parts]
    assert {str(page.relative_to(DOCS).with_suffix("")) for page in pages} == listed


def documented():
    """Return the objects that the API reference describes, and the names of data with their modules."""
    found = []
    for page in (DOCS / "api").glob("*.rst"):
        module = None
        for line in page.read_text().splitlines():
            if current := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = current[1]
            elif entry := re.match(r"\.\. (autoclass|autofunction|py:data):: (\S+)", line):
                found.append((module, entry[2]))
    return found


def test_the_reference_has_every_public_name():
    entries = documented()
    known = {id(getattr(importlib.import_module(module), key)) for module, key in entries if module not in _missing()}
    for room in ("", *(f".{room}" for room in ROOMS)):
        module = importlib.import_module(f"manyclass{room}")
        for key in dir(module):
            value = getattr(module, key)
            if key.startswith("_") or key == "TYPE_CHECKING" or inspect.ismodule(value):
                continue
            if not hasattr(value, "__module__"):
                # Equal numbers and strings may be one object.
                assert (module.__name__, key) in entries, f"{module.__name__}.{key}"
            elif value.__module__.startswith("manyclass"):
                assert id(value) in known, f"{module.__name__}.{key}"


def _missing():
    return {
        f"manyclass.integrations.{name}"
        for name, library in OPTIONAL.items()
        if importlib.util.find_spec(library) is None
    }


@pytest.mark.parametrize("integration", OPTIONAL)
def test_the_reference_has_every_integration(integration):
    pytest.importorskip(OPTIONAL[integration])
    module = importlib.import_module(f"manyclass.integrations.{integration}")
    public = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and callable(value) and value.__module__ == module.__name__
    }
    assert public == {key for of, key in documented() if of == module.__name__}


def test_the_version_is_in_one_place():
    assert "manyclass.__version__" in (DOCS / "conf.py").read_text()
    assert manyclass.__version__


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_files_that_a_page_names_exist(path):
    for code in inline_code(path):
        if re.fullmatch(r"(tests|examples|benchmarks|docs)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{name(path)}: {code}"
