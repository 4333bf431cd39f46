"""An error that a user can fix is one line on the standard error, before any work."""

import importlib
import signal
import subprocess
import sys

import pytest

from manyclass import cli
from manyclass.cli.main import COMMANDS


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["manyclass", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "methods,magic"], "`--only` must be of methods, margins,"),
        (["--quick", "--full"], "`--quick` and `--full` must not both be given"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--jobs", "0"], "0 is not in the range"),
        (["--jobs", "many"], "'many' is not a valid integer"),
        (["--slow"], "No such option"),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "paper", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--full"], "`--quick` and `--full` must not both be given"),
        (["--design", "magic"], "`designs` must be of importance;"),
        (["--device", "nowhere"], "`device` must be one that torch finds here, got 'nowhere'"),
        (["--data", "none.txt"], "`data` must be a file that can be read, got none.txt: No such file"),
        (["--data", "."], "a folder with train.txt, got ., which has none"),
        (["--held-out", "valid.txt"], "`--held-out` must come with `--data`, got valid.txt alone"),
        (["--redraw"], "`out` must hold the results.json of a study"),
        (["--split", "letters"], "'letters' is not one of"),
        (["--k", "0"], "0 is not in the range"),
    ],
)
def test_a_bad_option_of_a_study_is_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "study", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_folder_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "notes.txt").touch()
    assert run(monkeypatch, "paper", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("manyclass: `out` must be a new or empty folder")
    assert error.count("\n") == 1


def test_an_unknown_command_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "papier") == 2
    assert "No such command 'papier'" in capsys.readouterr().err


def test_help_exits_with_0(monkeypatch, capsys):
    assert run(monkeypatch, "paper", "--help") == 0
    assert "--claims" in capsys.readouterr().out


def test_help_does_not_wait_for_torch():
    shows = "from manyclass.cli import app; app(['--help'], standalone_mode=False)"
    code = f"{shows}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "predict   Predict the most probable classes" in done.stdout
    assert done.stdout.endswith("False\n")


def test_every_command_is_listed_and_says_what_it_does(monkeypatch, capsys):
    for name, about in COMMANDS.items():
        assert run(monkeypatch, name, "--help") == 0
        assert f"{name} [OPTIONS]" in capsys.readouterr().out
        assert about.endswith(".")


def test_ctrl_c_waits_for_an_import(monkeypatch, capsys):
    load, loaded = importlib.import_module, []

    def pressed(name):
        signal.raise_signal(signal.SIGINT)
        loaded.append(load(name))
        return loaded[-1]

    monkeypatch.setattr(importlib, "import_module", pressed)
    assert run(monkeypatch, "info", "none") == 2
    # The line break follows the ^C that a terminal shows.
    assert capsys.readouterr().err == "\nmanyclass: interrupted\n"
    assert loaded
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
