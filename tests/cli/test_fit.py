"""`manyclass fit` for each kind of data, from a file to predictions."""

import csv
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch

from manyclass import storage, tasks, training
from manyclass.errors import DiskFullError
from tests.cli.command import FLAGS, fit, options, run
from tests.tasks import problems
from tests.tasks.problems import KINDS, SETTINGS, Interrupts, files, same_state, to_evaluate

QUERIES = {
    "features": "1:1\n2:1 30:0.5\n",
    "text": "w00 w01\nw05\n",
    "sequences": "ann\tw00\nann\tw01\nben\tw05\n",
    "triples": "w00\tplus 1\n?\tplus 2\tw05\n",
}
ENDING = {"features": ".svm"}
SHOWN = {
    "features": ["0", "1"],
    "text": ["w00 w01", "w05"],
    "sequences": ["ann", "ben"],
    "triples": ["w00 plus 1", "? plus 2 w05"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_file_to_predictions(tmp_path, capsys, kind):
    data = problems.WRITERS[kind](tmp_path)
    out = tmp_path / "model"
    assert fit(kind, data, out) == 0
    printed, output = capsys.readouterr()
    assert data.name in output
    assert "held-out loss" in output
    assert "stopped (epochs)" in output
    assert f"model   {out}" in printed
    assert "times in training" in printed

    assert run("evaluate", out, to_evaluate(kind, data), "--json", tmp_path / "numbers.json") == 0
    printed = capsys.readouterr().out
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert to_evaluate(kind, data).name in printed
    assert f"{numbers['loss']:.4f}" in printed
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    # The frequencies of words alone give a perplexity of about 16, a uniform guess 24.
    assert numbers["perplexity"] < 12
    assert sum(band["examples"] for band in numbers["by_frequency"]) == pytest.approx(numbers["examples"])

    # Predictions need nothing but the folder.
    for path in (data, to_evaluate(kind, data)):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    moved = shutil.move(out, tmp_path / "moved")
    for path in moved.iterdir():
        if path.name != "best.safetensors":
            path.unlink()
    queries = tmp_path / f"queries{ENDING.get(kind, '.txt')}"
    queries.write_text(QUERIES[kind])
    assert run("predict", moved, queries, "--top", 3) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == SHOWN[kind]
    for row in rows:
        names, chances = row[1::2], [float(chance) for chance in row[2::2]]
        assert len(set(names)) == len(names) == 3
        assert chances == sorted(chances, reverse=True)
        assert 0 < sum(chances) <= 1.0001
    assert run("info", moved) == 0
    output = capsys.readouterr().out
    assert kind in output
    assert "best" in output


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_saves_and_resume_goes_on_bit_for_bit(tmp_path, capsys, monkeypatch, kind):
    data = problems.WRITERS[kind](tmp_path)
    assert fit(kind, data, tmp_path / "whole") == 0
    capsys.readouterr()
    out = tmp_path / "a model"
    with monkeypatch.context() as patch:
        patch.setattr(training, "ProgressLine", lambda: Interrupts(11))
        assert fit(kind, data, out) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        f"manyclass: interrupted after step 11; all of it is saved. To go on: manyclass fit --out '{out}' --resume"
    )
    assert run("fit", "--out", out, "--resume", "--no-report") == 0
    one, other = (tasks.open_model(tmp_path / name) for name in ("whole", "a model"))
    assert same_state(one, other)
    logs = []
    for name in ("whole", "a model"):
        with (tmp_path / name / "log.csv").open() as file:
            logs.append([{**row, "seconds": ""} for row in csv.DictReader(file)])
    assert logs[0] == logs[1]
    assert files(out) == ["best.safetensors", "fit.json", "log.csv", "newest.safetensors", "previous.safetensors"]


def test_sigterm_is_handled_as_ctrl_c(tmp_path, capsys, monkeypatch):
    data, out = problems.write_features(tmp_path), tmp_path / "model"

    class Ended(training.Callback):
        def on_step(self, training):
            if training.progress.step == 11:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(training, "ProgressLine", Ended)
    before = signal.getsignal(signal.SIGTERM)
    assert fit("features", data, out) == 2
    assert "interrupted after step 11; all of it is saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.undo()
    assert run("fit", "--out", out, "--resume", "--no-report") == 0


def test_sigterm_saves_in_the_background_of_a_script(tmp_path, capsys):
    """A shell starts `manyclass fit … &` with Ctrl-C ignored."""
    data, out = problems.write_features(tmp_path), tmp_path / "model"
    command = [sys.executable, "-m", "manyclass", "fit", data, "--out", out, "--seconds", "600", "--no-report"]
    with subprocess.Popen(
        list(map(str, command)),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        try:
            wait_for(out / "fit.json")
            # Steps follow each other without a pause, so the signal arrives within one.
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 2
        finally:
            process.kill()
        message = process.stderr.read().splitlines()[-1]
    saved = re.fullmatch(r"manyclass: interrupted after step ([\d,]+); all of it is saved. To go on: .*", message)
    assert saved, message
    content = storage.load(out / "newest.safetensors", content_type="checkpoint")
    assert content["state"]["training"]["progress"]["step"] == int(saved[1].replace(",", ""))


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.01)


def test_ctrl_c_while_data_is_read_leaves_an_empty_folder(tmp_path, capsys, monkeypatch):
    data, out = problems.write_features(tmp_path), tmp_path / "model"

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("manyclass.tasks.features.class_counts", interrupt)
        assert fit("features", data, out) == 2
    assert capsys.readouterr().err == ("manyclass: interrupted; nothing was trained yet: run the same command again\n")
    assert files(out) == []
    assert fit("features", data, out) == 0


def test_resume_refuses_changed_options(tmp_path, capsys, monkeypatch):
    data, out = problems.write_features(tmp_path), tmp_path / "model"
    monkeypatch.setattr(training, "ProgressLine", lambda: Interrupts(11))
    assert fit("features", data, out) == 2
    monkeypatch.undo()
    capsys.readouterr()
    for arguments, message in [
        (
            ["--learning-rate", 0.5],
            "`learning_rate` must be left out, or what it was when the training began, 0.1, got 0.5",
        ),
        (["--probe-every", 7], "`probe_every` must be left out, or what it was when the training began, None, got 7"),
        (["--evaluated", 7], "`evaluated` must be left out, or what it was when the training began, 20000, got 7"),
        (["--evaluate-every", 7], "`evaluate_every` must be left out, or what it was when the training began, None"),
        (["--text"], f"`--text` must be left out: the training in {out} is of features"),
        (["--label", "x"], "`--label` must come with `DATA`, got x alone"),
        ([data, "--label", "x"], "`--label` must be left out, or what it was when the training began, got x"),
        ([tmp_path / "none.svm"], f"`data` must be what the training began with, got {tmp_path / 'none.svm'}: No such"),
        (["--from-previous"], f"cannot read {out / 'previous.safetensors'}: there is no such file"),
    ]:
        assert run("fit", *arguments, "--out", out, "--resume", "--no-report") == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"manyclass: {message}")
    assert (
        run(
            "fit",
            data,
            "--out",
            out,
            "--resume",
            "--no-report",
            "--epochs",
            6,
            "--learning-rate",
            0.1,
        )
        == 0
    )
    assert tasks.open_model(out).spec.settings.epochs == 6
    capsys.readouterr()
    # Resuming a finished training reports the end again.
    assert run("fit", "--out", out, "--resume", "--no-report") == 0
    assert "stopped (epochs)" in capsys.readouterr().err


def test_a_failed_save_is_one_line_and_other_warnings_stay_warnings(tmp_path, capsys, monkeypatch):
    data, out = problems.write_features(tmp_path), tmp_path / "model"
    save, failed = storage.save, []

    def fails_once(path, *arguments, **options):
        if not failed:
            failed.append(path)
            warnings.warn("a bug", RuntimeWarning, stacklevel=1)
            raise DiskFullError("no space is left")
        save(path, *arguments, **options)

    monkeypatch.setattr(storage, "save", fails_once)
    with pytest.warns(RuntimeWarning, match="a bug") as found:
        assert fit("features", data, out) == 0
    assert [str(warning.message) for warning in found] == ["a bug"]
    output = capsys.readouterr().err.splitlines()
    assert output.count("manyclass: no space is left. Training goes on and will try again") == 1


def test_an_undersized_k_warns_in_one_line_and_the_summary_says_so(tmp_path, capsys):
    data, out = problems.write_sequences(tmp_path), tmp_path / "model"
    # A learning rate that makes the model sure of its classes within a few steps.
    assert fit("sequences", data, out, "--k", 1, "--epochs", 10, "--learning-rate", 1.0) == 0
    printed, output = capsys.readouterr()
    lines = [line for line in output.splitlines() if line.startswith("manyclass: the error of log Z̃ is")]
    assert len(lines) == 1
    assert "probabilities may be off by a factor of" in lines[0]
    assert "InaccurateWarning" not in output
    assert ".py" not in output
    assert re.search(r"^error of log Z̃ at the end: \S+ nats, which is much too high: ", printed, re.MULTILINE)


def test_the_summary_ends_with_the_error_unless_none_was_recorded(tmp_path, capsys):
    data = problems.write_features(tmp_path)
    for name, more, expected in (
        ("fine", [], r"error of log Z̃ at the end: 0\.\d+ nats\n"),
        ("exact", ["--sampler", "exact"], r"error of log Z̃ at the end: 0, all classes were scored\n"),
        ("none", ["--probe-every", 0], ""),
    ):
        assert fit("features", data, tmp_path / name, *more) == 0
        printed = capsys.readouterr().out
        assert re.search(rf"┘\n{expected}model   ", printed), printed


def test_a_page_is_drawn(tmp_path, capsys):
    pytest.importorskip("plotly")
    data, out = problems.write_features(tmp_path), tmp_path / "model"
    assert run("fit", data, "--out", out, *options(SETTINGS["features"]), "--probe-every", 10) == 0
    assert f"report  {out / 'report.html'}" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    for title in ("Result", "Learning curves", "Error of the approximation", "Rare and frequent classes"):
        assert title in page
    assert files(out / "figures") == [f"{n}.{e}" for n in ("error", "frequency", "learning") for e in ("png", "svg")]


def test_a_log_for_tensorboard_is_written_beside_the_other(tmp_path, monkeypatch):
    folders, records = [], []

    class Log(training.Callback):
        def __init__(self, folder):
            folders.append(folder)

        def on_record(self, training, record):
            records.append(record)

    monkeypatch.setattr(training, "TensorBoardLog", Log)
    data, out = problems.write_features(tmp_path), tmp_path / "model"
    assert fit("features", data, out, "--log", "tensorboard") == 0
    assert folders == [out / "tensorboard"]
    assert len(records) == len((out / "log.csv").read_text().splitlines()) - 1


def test_unknown_labels_are_reported_as_left_out(trained, tmp_path, capsys):
    _, out, _ = trained("features")
    data = tmp_path / "more.svm"
    data.write_text("w00 1:1\nunicorn 2:1\nw01 3:1\n")
    assert run("evaluate", out, data) == 0
    assert "1 of 3 rows are left out: their labels are missing or unknown" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_checkpoint_can_be_evaluated(trained, capsys, kind):
    _, out, data = trained(kind)
    assert run("evaluate", out, to_evaluate(kind, data), "--checkpoint", "newest") == 0
    printed = capsys.readouterr().out
    newest = tasks.open_model(out, checkpoint="newest")
    measured = tasks.measure(
        newest, tasks.TASKS[kind].evaluation_batches(newest.spec, tasks.Source(to_evaluate(kind, data)))[0]
    )
    assert f"{measured.loss:.4f}" in printed


def test_a_compressed_file_is_read_as_what_it_holds(tmp_path, capsys):
    import gzip

    data = problems.write_sequences(tmp_path)
    packed = tmp_path / "views.tsv.gz"
    packed.write_bytes(gzip.compress(data.read_bytes()))
    for name, path in (("plain", data), ("packed", packed)):
        assert fit("sequences", path, tmp_path / name) == 0
    assert same_state(*(tasks.open_model(tmp_path / name) for name in ("plain", "packed")))


def test_the_seed_decides(tmp_path, capsys):
    data = problems.write_features(tmp_path)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        assert fit("features", data, tmp_path / name, "--seed", seed) == 0
    one, same, other = (tasks.open_model(tmp_path / name) for name in ("one", "same", "other"))
    assert same_state(one, same)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert FLAGS.keys() == set(KINDS)
