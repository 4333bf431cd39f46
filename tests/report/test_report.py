"""A report is self-contained, complete and reproducible."""

import json
import math
import re

import pytest

from manyclass.report import Curve, Figure, Panel, Report, ReportTable, Section, write_report
from manyclass.report.content import finite_or_none
from tests.browser import CHROMIUM, browse


def example():
    lines = [
        Curve("measured", [1, 2, 3], [1.0, math.nan, 3.0], [0.5, math.nan, 2.5], [1.5, math.nan, 3.5], points=True),
        Curve("theory </script>", [1, 2, 3], [1.0, 2.0, 3.0], dashed=True, colour_of="measured"),
    ]
    panels = [Panel("Left", "x", "y", lines), Panel("Right", "x", "y", lines[1:], log_x=True, log_y=True)]
    figures = [Figure("first", "A caption.", panels), Figure("second", "Another.", panels[:1] * 4)]
    table = ReportTable(["what", "holds"], [["a < b", "yes"], ["b & c", "no"]], "A table.", ["good", "bad"])
    return Report("Title", "Summary.", [Section("Claims", [table]), Section("Plots", ["Text.", *figures])], ["Note."])


@pytest.fixture
def written(tmp_path):
    return write_report(example(), tmp_path)


def content_of(page):
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    return json.loads(found.group(1))


def test_the_page_holds_all_content(written):
    page = written.page.read_text()
    first, second = content_of(page)
    assert [len(figure["panels"]) for figure in (first, second)] == [2, 4]
    measured, theory = first["panels"][0]["curves"]
    assert measured["y"] == [1.0, None, 3.0]
    assert theory["label"] == "theory </script>"
    assert theory["light"] == measured["light"], "`colour_of` gives the colour of another curve"
    assert "a &lt; b" in page
    assert '<tr class="bad">' in page


def test_the_page_loads_no_other_resource(written):
    # URLs within the code of plotly.js are not fetched; those in tags are.
    page = re.sub(r"<script>.*?</script>", "", written.page.read_text(), flags=re.DOTALL)
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "<link" not in page


def test_every_figure_is_written_as_png_and_svg(written):
    assert sorted(path.name for path in written.pictures) == ["first.png", "first.svg", "second.png", "second.svg"]
    for path in written.pictures:
        assert path.stat().st_size > 1000


def test_the_same_numbers_give_the_same_files(written, tmp_path):
    again = write_report(example(), tmp_path / "again")
    assert again.page.read_bytes() == written.page.read_bytes()
    for one, other in zip(written.pictures, again.pictures, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def figure_of(name, *labels):
    return Figure(name, "", [Panel("", "", "", [Curve(label, [1], [1.0]) for label in labels])])


def test_labels_keep_their_colour_unless_it_is_taken():
    assert example().colours() == {"first": {"measured": 0}, "second": {"measured": 0}}
    figures = [figure_of("one", "a", "b"), figure_of("two", "c", "b"), figure_of("three", "a", "c", "b")]
    colours = Report("", "", [Section("", figures)]).colours()
    assert colours["one"] == {"a": 0, "b": 1}
    assert colours["two"] == {"b": 1, "c": 0}
    assert colours["three"]["a"] == 0
    assert colours["three"]["b"] == 1
    assert len(set(colours["three"].values())) == 3


def test_non_finite_numbers_become_none():
    assert finite_or_none([1, math.inf, math.nan]) == [1.0, None, None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve("a", [1, 2], [1.0]), r"`y` of 'a' must have length 2, got 1"),
        (lambda: Curve("a", [1], [1.0], low=[1.0]), r"`low` and `high` of 'a' must be given together"),
        (lambda: Figure("No!", "", []), r"`name` must be of lower-case letters, digits and hyphens, got 'No!'"),
        (lambda: ReportTable(["a", "b"], [["1"]]), r"`rows` must have 2 cells each, got 1 at position 0"),
    ],
)
def test_invalid_content_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_every_plot_without_an_error(written, tmp_path, scheme):
    options = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    document, log = browse(written.page, tmp_path / "profile", *options)
    assert 'data-drawn="2"' in document
    assert document.count('class="main-svg"') >= 6
    assert document.count('aria-pressed="true"') == 4
    assert "CONSOLE" not in log, log
