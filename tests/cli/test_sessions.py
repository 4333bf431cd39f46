"""Sessions on the command line: a held-out file, metrics at any k, and how they are shown."""

import csv
import itertools
import json
import re
import sys

import pytest

from manyclass import tasks, training
from manyclass.cli.progress import evaluating
from manyclass.cli.tables import print_measured
from tests.cli.command import fit, run
from tests.tasks import problems
from tests.tasks.problems import Interrupts, same_state

NAMES = ["MRR", "HR@3", "NDCG@3", "MRR@3", "HR@20", "NDCG@20", "MRR@20"]


@pytest.fixture
def files(tmp_path):
    """Return a file to train on, and one of 30 sessions of 2 items and one of 1."""
    data = problems.write_sequences(tmp_path)
    held_out = tmp_path / "test.tsv"
    held_out.write_text("".join(f"s{i}\tw{i % 24:02}\ns{i}\tw{(2 * i + 1) % 24:02}\n" for i in range(30)) + "x\tw01\n")
    return data, held_out


def test_a_session_file_is_held_out_and_measured_at_any_k(files, tmp_path, capsys, monkeypatch):
    data, held_out = files
    options = ("--held-out", held_out, "--at", "3,20", "--report")
    assert fit("sequences", data, tmp_path / "whole", *options) == 0
    printed, output = capsys.readouterr()
    assert "held out: the last item of 30 users of test.tsv\nleft out: 1 users with one item\n" in output
    for name in NAMES:
        assert f"  {name} " in output  # the progress line
        assert name in printed
        assert name in (tmp_path / "whole" / "report.html").read_text()

    out = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(training, "ProgressLine", lambda: Interrupts(11))
        assert fit("sequences", data, out, "--held-out", held_out, "--at", "3,20") == 2
    assert run("fit", "--out", out, "--resume", "--no-report", "--at", "20,3") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "`at` must be left out, or what it was when the training began, (3, 20), got (20, 3)" in error
    text = held_out.read_text()
    held_out.write_text(text.replace("x\tw01\n", ""))
    assert run("fit", "--out", out, "--resume", "--no-report") == 2
    assert "`held-out` must be what the training began with" in capsys.readouterr().err
    held_out.write_text(text)
    assert run("fit", "--out", out, "--resume", "--no-report", "--at", "3,20") == 0
    assert same_state(*(tasks.open_model(tmp_path / name) for name in ("whole", "resumed")))
    logs = []
    for name in ("whole", "resumed"):
        with (tmp_path / name / "log.csv").open() as file:
            logs.append([{**row, "seconds": ""} for row in csv.DictReader(file)])
    assert logs[0] == logs[1]
    assert set(NAMES) < set(logs[0][0])

    for more, wanted in (([], NAMES), (["--at", "5"], ["MRR", "HR@5", "NDCG@5", "MRR@5"])):
        capsys.readouterr()
        assert run("evaluate", out, held_out, "--json", tmp_path / "numbers.json", *more) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(
            "test.tsv: the last item of 30 users, ranked among all 24\nleft out: 1 users with one"
        )
        numbers = json.loads((tmp_path / "numbers.json").read_text())
        assert [name for name in numbers if name in wanted] == wanted
        assert len(numbers) == len(wanted) + 4
        assert all(name in printed for name in wanted)
        assert all(set(wanted) < set(band) for band in numbers["by_frequency"])


@pytest.mark.parametrize("at", ["0", "-3", "10,0", "ten", "", "10,,20", "10,10", "10,010", "1.5", "9" * 5000])
@pytest.mark.parametrize("command", ["fit", "evaluate"])
def test_a_bad_k_is_one_line(trained, capsys, tmp_path, command, at):
    _, model, data = trained("sequences")
    arguments = ["fit", data, "--sequences", "--out", tmp_path / "m"] if command == "fit" else ["evaluate", model, data]
    assert run(*arguments, "--at", at) == 2
    error = capsys.readouterr().err
    expected = "manyclass: `--at` must be different whole numbers, 1 or more, with commas between, got "
    assert error.startswith(f"{expected}{at!r}"[:140])
    assert error.count("\n") == 1
    assert not (tmp_path / "m").exists()


def test_a_k_beyond_the_classes_is_one_line(trained, files, capsys, tmp_path):
    _, model, data = trained("sequences")
    expected = "manyclass: `at` must be at most the number of classes, 24, got 25\n"
    assert run("evaluate", model, data, "--at", "10,25") == 2
    assert capsys.readouterr().err == expected
    assert run("evaluate", model, data, "--at", "3000000000") == 2
    assert capsys.readouterr().err == expected.replace("25", "3,000,000,000")
    assert fit("sequences", files[0], tmp_path / "m", "--at", "25") == 2
    assert capsys.readouterr().err == expected
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize(
    ("columns", "first"), [(200, "times in training ┃ examples"), (80, "times in training ┃ 1 to 9")]
)
def test_no_number_is_cut_off(capsys, monkeypatch, columns, first):
    metrics = {f"NDCG@{k}": k / 1000 for k in range(10, 17)}
    band = tasks.Band(1, 9, 1_234_567.0, 12.3456, metrics)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_measured(tasks.Measured(11.5, metrics, 1_234_567.0, (band,)))
    printed = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= columns
    assert " ".join(printed.split()).count(first) == 1
    for text in ("1,234,567", "12.3456", f"{band.perplexity:,.2f}", "11.5000", "NDCG@16", "0.0160", "all"):
        assert text in printed


@pytest.mark.parametrize(
    ("terminal", "seconds", "shown"),
    [
        (True, 2, "\revaluating   0%\revaluating  33%\revaluating  67%\r\x1b[K"),
        (True, 0.5, ""),
        (False, 2, ""),
        (False, 11, "evaluating   0%\nevaluating  33%\nevaluating  67%\n"),
    ],
)
def test_a_long_evaluation_shows_its_progress(capsys, monkeypatch, terminal, seconds, shown):
    times = itertools.count(0, seconds)
    monkeypatch.setattr("manyclass.cli.progress.time.monotonic", lambda: next(times))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    batches = [1, 2, 3] if shown else [1]
    assert list(evaluating(batches)) == batches
    assert capsys.readouterr().err == shown


def test_the_last_evaluation_of_a_training_shows_its_progress(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("manyclass.cli.fit.evaluating", lambda batches: [*batches, *batches])
    assert fit("sequences", files[0], tmp_path / "m", "--held-out", files[1], "--epochs", 1) == 0
    assert "│       60 │" in capsys.readouterr().out
