"""The demo, in small."""

import sys

import pytest

from manyclass import cli
from manyclass.lab.demo import BEGINNINGS, Side, compare
from manyclass.tasks import Measured, open_model
from manyclass.training import Record


def side(*points):
    records = [Record(i, 0, i, seconds, 0.0, held_out_loss=loss) for i, (seconds, loss) in enumerate(points, 1)]
    return Side(records, Measured(records[-1].held_out_loss, {}, 1.0, ()), len(records))


def test_who_is_better_at_equal_times_is_said():
    exact = side((0.5, 1.0), (5.0, 3.0), (10.0, 2.5))
    assert compare(side((4.0, 2.0), (9.0, 1.9)), exact, 10.0).startswith("At every equal time after the first tenth")
    assert "higher perplexity at 10 s, of 2 times compared" in compare(side((4.0, 2.0), (9.0, 2.6)), exact, 10.0)
    assert "no evaluation of both" in compare(side((11.0, 2.0)), exact, 10.0)


def test_it_trains_both_ways_keeps_the_model_and_draws(monkeypatch, capsys, tmp_path):
    out = tmp_path / "demo"
    arguments = ["manyclass", "demo", "--out", str(out), "--files", "12", "--seconds", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(beginning in shown for beginning in BEGINNINGS)
    assert shown.count("stopped (seconds)") == 2
    page = (out / "report.html").read_text()
    assert "The next token of Python source" in page
    assert len(open_model(out / "model").names) > 100
