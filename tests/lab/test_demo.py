"""The demo trains both ways and writes a report, here on a few files for a second."""

import sys

import pytest

from manyclass import cli
from manyclass.lab.demo import PROMPTS, DemoTraining, compare
from manyclass.tasks import Measured, open_model
from manyclass.training import Record


def training(*points):
    records = [Record(i, 0, i, seconds, 0.0, held_out_loss=loss) for i, (seconds, loss) in enumerate(points, 1)]
    return DemoTraining(records, Measured(records[-1].held_out_loss, {}, 1.0, ()), len(records))


def test_perplexities_are_compared_at_equal_times():
    exact = training((0.5, 1.0), (5.0, 3.0), (10.0, 2.5))
    better, worse, late = training((4.0, 2.0), (9.0, 1.9)), training((4.0, 2.0), (9.0, 2.6)), training((11.0, 2.0))
    expected = "After the first tenth sampled training has the lower perplexity at all 2 times compared"
    assert compare(better, exact, 10.0).startswith(expected)
    assert "higher perplexity at 10 s, of 2 times compared" in compare(worse, exact, 10.0)
    assert "no evaluation at equal times" in compare(late, exact, 10.0)


def test_it_trains_both_ways_saves_the_model_and_writes_a_report(monkeypatch, capsys, tmp_path):
    out = tmp_path / "demo"
    arguments = ["manyclass", "demo", "--out", str(out), "--files", "12", "--seconds", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    # A default that has a choice even among few classes, and finds that nothing is cheaper than to score all of them.
    monkeypatch.setattr("manyclass.defaults.K", 64)
    monkeypatch.setattr("manyclass.heads._learning.step_seconds", lambda *arguments: 0.2)
    monkeypatch.setattr("manyclass.heads._learning.exact_seconds", lambda *arguments: (None, 0.1))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in PROMPTS)
    assert printed.count("stopped (seconds)") == 2
    page = (out / "report.html").read_text()
    assert "The next token of Python source" in page
    (decision,) = [line for line in printed.splitlines() if line.endswith("from now on all classes")]
    assert decision in page
    assert len(open_model(out / "model").names) > 100
