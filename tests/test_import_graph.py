"""The rooms of the package import each other without a cycle, and CONTRIBUTING shows the edges."""

from pathlib import Path

import pytest

from tests import import_graph
from tests.import_graph import BEGIN, END, find_cycle, import_edges, mermaid, with_block

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_rooms_have_no_import_cycle():
    cycle = find_cycle(import_edges())
    assert cycle is None, " -> ".join(cycle)


def test_the_graph_in_contributing_is_current():
    text = CONTRIBUTING.read_text(encoding="utf-8")
    if BEGIN not in text:
        pytest.skip("CONTRIBUTING.md has no import graph")
    assert with_block(text, mermaid(import_edges())) == text


@pytest.fixture
def package(tmp_path):
    """A package of four rooms with every form of import and no cycle."""
    files = {
        "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample.a.one import One as One\n",
        "__main__.py": "from sample.d import main\n",
        "a/__init__.py": "from sample.a.one import One as One\n",
        "a/one.py": "import json\nfrom .. import b\nclass One: ...\n",
        "b.py": "",
        "c/__init__.py": "",
        "c/two.py": "def late():\n    import sample.b\n    from sample import One, __version__\n",
        "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample.c.two import late\n",
    }
    for name, source in files.items():
        (tmp_path / "sample" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sample" / name).write_text(source)
    return tmp_path / "sample"


def test_every_form_of_import_is_an_edge(package):
    assert import_edges(package) == {"a": ["b"], "b": [], "c": ["a", "b"], "d": ["c"]}
    assert find_cycle(import_edges(package)) is None


def test_a_cycle_is_found(package):
    (package / "b.py").write_text("def late():\n    from sample.d import late\n")
    cycle = find_cycle(import_edges(package))
    assert cycle[0] == cycle[-1]
    assert set(cycle) <= {"a", "b", "c", "d"}


def test_a_document_is_written_and_checked(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(import_graph, "import_edges", lambda: import_edges(package))
    path = tmp_path / "README.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert import_graph.main(["--check", str(path)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert import_graph.main(["--write", str(path)]) == 0
    assert import_graph.main(["--check", str(path)]) == 0
    assert path.read_text().startswith(f"before\n{BEGIN}\n```mermaid\ngraph LR\n    a --> b\n    c --> a & b\n")
    path.write_text("no markers")
    assert import_graph.main(["--check", str(path)]) == 1
    assert "markers" in capsys.readouterr().err
