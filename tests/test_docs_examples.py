"""The examples of the documentation run at a small scale and show what their texts say."""

import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
PAGES = ("next_word", "next_item", "knowledge_graph", "two_towers", "document_labels")
FULL_SCALE = "SCALE = 1.0"


def cells(page):
    """Return the first line and the code of each code cell."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    found = re.finditer(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, cell.start(1)), cell[1]) for cell in found]


def run(page, scale, monkeypatch):
    """Execute all cells as one program; return its names and its figures, which were drawn."""
    figures = []

    def show():
        figures.extend(plt.figure(number) for number in plt.get_fignums())
        for figure in figures:
            figure.canvas.draw()

    matplotlib.use("Agg")
    monkeypatch.setattr(plt, "show", show)
    names = {"__name__": "__main__"}
    for line, code in cells(page):
        # Empty lines before the code, so that errors have the line numbers of the page.
        exec(compile("\n" * line + code.replace(FULL_SCALE, f"SCALE = {scale}"), f"{page}.md", "exec"), names)
    return names, figures


@pytest.fixture(autouse=True)
def no_figures_are_left():
    yield
    plt.close("all")


def evaluated(history):
    return [(record.step, record.held_out_loss) for record in history.records if record.held_out_loss is not None]


def excess_at_equal_steps(sampled, exact):
    """Return sampled training's loss minus exact training's at the last step that both have reached."""
    step = min(sampled[-1][0], exact[-1][0])
    loss, exact_loss = (np.interp(step, *np.transpose(curve)) for curve in (sampled, exact))
    return loss - exact_loss


def check_drawn(figures):
    (figure,) = figures
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylabel()
    # White, so that black text on it is readable on a dark page too.
    assert figure.get_facecolor() == (1, 1, 1, 1)
    for panel in figure.axes:
        assert panel.get_xlabel()
        for line in panel.lines:
            assert np.isfinite(line.get_ydata()).all()
            assert len(line.get_ydata()) > 0


def test_the_index_lists_the_pages():
    listed = re.findall(r"^\w+$", (FOLDER / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == list(PAGES)
    assert {path.stem for path in FOLDER.glob("*.md")} == {*PAGES, "index"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_scale(page):
    assert cells(page)[0][1].endswith(f"\n{FULL_SCALE}\n")


def test_next_word(monkeypatch, capsys):
    names, figures = run("next_word", 0.1, monkeypatch)
    sampled, exact = ([(step, np.log(ppl)) for step, _, ppl in names[name]] for name in ("sampled", "exact"))
    assert names["num_classes"] > 2000
    assert sampled[-1][1] < sampled[0][1] - 0.3
    assert sampled[-1][1] < names["by_frequency"] - 0.5
    assert excess_at_equal_steps(sampled, exact) < 0.2
    check_drawn(figures)
    assert "The number of" in capsys.readouterr().out


def test_next_item(monkeypatch):
    names, figures = run("next_item", 0.1, monkeypatch)
    sampled, exact = evaluated(names["sampled"]), evaluated(names["exact"])
    assert len(names["items"]) > 1024
    assert sampled[-1][1] < sampled[0][1] - 0.1
    assert excess_at_equal_steps(sampled, exact) < 0.2
    assert 0 < names["sampled"].records[-1].metrics["MRR@20"] < names["sampled"].records[-1].metrics["HR@20"] < 1
    check_drawn(figures)
    assert not {*names["best"].ids[0].tolist()} & {*names["seen"][0].tolist()}


def test_knowledge_graph(monkeypatch):
    names, figures = run("knowledge_graph", 0.1, monkeypatch)
    sampled, exact = evaluated(names["sampled"]), evaluated(names["exact"])
    assert len(names["entities"]) > 1024
    assert sampled[-1][1] < np.log(len(names["entities"])) - 0.3
    assert excess_at_equal_steps(sampled, exact) < 0.3
    # The other true tails of a triple are known, and the triple's own tail is not among them.
    triples = names["train_triples"]
    others = names["known_in_training"].others(triples)
    assert (others >= 0).any()
    assert not (others == triples[:, 2:]).any()
    check_drawn(figures)


def test_two_towers(monkeypatch):
    names, figures = run("two_towers", 0.1, monkeypatch)
    losses = {name: evaluated(history) for name, history in names["runs"].items()}
    number = len(names["items"])
    assert number > 1024
    for name in ("in-batch, corrected", "corrected, hard negatives", "all items"):
        assert losses[name][-1][1] < np.log(number), name
    assert losses["in-batch, corrected"][-1][1] < losses["in-batch, corrected"][0][1]
    assert excess_at_equal_steps(losses["corrected, hard negatives"], losses["in-batch, corrected"]) < 0.3
    assert excess_at_equal_steps(losses["in-batch, corrected"], losses["all items"]) < 0.3
    hard = names["hard"]
    assert hard.shape == (number, 5)
    assert not (hard.numpy() == np.arange(number)[:, None]).any()
    assert (hard >= 0).sum(1).min() >= 4
    check_drawn(figures)


def test_document_labels(monkeypatch):
    names, figures = run("document_labels", 0.1, monkeypatch)
    assert len(names["sampled"].classes_) > 1024
    precision = names["precisions"]
    assert precision["sampled"][0] > precision["most frequent"][0]
    assert abs(precision["sampled"][0] - precision["exact"][0]) < 0.1
    check_drawn(figures)
