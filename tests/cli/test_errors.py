"""Bad values give one line that names them, exit code 2 and no files; help pages are complete."""

import re

import click
import pytest

import manyclass
from manyclass import cli
from tests.cli.command import fit, run
from tests.tasks import problems
from tests.tasks.problems import files

COMMANDS = sorted(cli.app.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_what_it_takes(capsys, command):
    assert run(command, "--help") == 0
    output = capsys.readouterr().out
    plain = " ".join(output.split())
    for parameter in cli.app.commands[command].params:
        if isinstance(parameter, click.Argument):
            assert parameter.name.upper() in output
            continue
        assert max(parameter.opts, key=len) in output
        assert parameter.help, parameter.name
        assert parameter.help.split(";")[0].split(".")[0] in plain
        if isinstance(parameter.type, click.Choice):
            assert all(str(choice) in output for choice in parameter.type.choices)
        if parameter.default not in (None, False) and parameter.show_default:
            assert f"default: {parameter.default}" in plain or f"default: {parameter.default:g}" in plain
    assert not re.search(r"\bTODO\b|None|<class|lambda", output)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_page(capsys, command):
    assert run(command, "-h") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 110


def test_the_main_help_names_each_command_and_the_version_is_printed(capsys):
    assert run("--help") == 0
    output = capsys.readouterr().out
    assert all(f"  {command} " in output for command in COMMANDS)
    assert run("--version") == 0
    assert capsys.readouterr().out.endswith(f"manyclass {manyclass.__version__}\n")


def test_help_shows_the_type_of_each_option(capsys):
    run("fit", "--help")
    output = capsys.readouterr().out
    for option, kind in (
        ("--epochs", "INTEGER"),
        ("--learning-rate", "FLOAT"),
        ("--held-out", "FILE"),
        ("--label", "COLUMN"),
        ("--out", "MODEL"),
        ("--batch-size", "INTEGER"),
        ("--checkpoint-every", "FLOAT"),
    ):
        assert re.search(rf"{option} {kind}", output), option


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "x"], "`--k` must be a whole number or auto, got 'x'"),
        (["--k", "-5"], "`--k` must be a whole number or auto, got '-5'"),
        (["--k", "0"], "`k` must be at least 1, got 0"),
        (["--hidden", "a,b"], "`--hidden` must be whole numbers, 1 or more, with commas between, got 'a,b'"),
        (["--hidden", "5,0"], "`--hidden` must be whole numbers, 1 or more, with commas between, got '5,0'"),
        (["--learning-rate", "-1"], "`learning_rate` must be finite and above 0, got -1.0"),
        (["--learning-rate", "nan"], "`learning_rate` must be finite and above 0, got nan"),
        (["--learning-rate", "fast"], "'fast' is not a valid float"),
        (["--epochs", "0"], "`epochs` must be at least 1, got 0"),
        (["--epochs", "many"], "'many' is not a valid integer"),
        (["--seconds", "0"], "`seconds` must be finite and above 0, got 0.0"),
        (["--patience", "0"], "`patience` must be at least 1, got 0"),
        (["--batch-size", "0"], "`batch_size` must be at least 1, got 0"),
        (["--encoder-learning-rate", "0"], "`encoder_learning_rate` must be finite and above 0, got 0.0"),
        (["--clip", "-1"], "`clip` must be finite and above 0, got -1.0"),
        (["--rank", "0"], "`rank` must be at least 1, got 0"),
        (["--seed", "-1"], "`seed` must be at least 0, got -1"),
        (["--optimizer", "lion"], "'lion' is not one of 'adagrad', 'adam', 'sgd'"),
        (["--sampler", "magic"], "'magic' is not one of"),
        (["--objective", "magic"], "'magic' is not one of"),
        (["--device", "nowhere"], "`device` must be one that torch finds here, got 'nowhere'"),
        (["--device", "meta"], "`device` must be one that torch finds here, got 'meta'"),
        (["--rmse-log-z", "0"], "`rmse_log_z` must be finite and above 0, got 0.0"),
        (["--rmse-log-z", "0.1", "--sampler", "learned"], "`rmse_log_z` must come with `k` 'auto' if a `sampler` is"),
        (
            ["--rmse-log-z", "0.1", "--k", "5"],
            "`rmse_log_z` must come without `k`, or with `k` 'auto', got 0.1",
        ),
        (["--from-previous"], "`--from-previous` must come with `--resume`"),
        (["--text", "--triples"], "`--text` and `--triples` must not both be given"),
        (["--format", "word"], "`format` must be of a format that is one of"),
        (["--split", "letters"], "'letters' is not one of 'spaces', 'words'"),
        (["--min-count", "0"], "0 is not in the range"),
        (["--split", "words"], "`--split` must be left out for features, got words"),
        (["--min-count", "2"], "`--min-count` must be left out for features, got 2"),
        (["--text", "--label", "x"], "`--label` must be left out for text, got x"),
        (["--text", "--labels", "x.npy"], "`--labels` must be left out for text, got x.npy"),
        (["--triples", "--format", "csv"], "`--format` must be left out for triples, got csv"),
        (["--dim", "5"], "`--dim` must be left out for features, got 5"),
        (["--untied"], "`--untied` must be left out for features, got False"),
        (["--text", "--hidden", "5"], "`--hidden` must be left out for text, got (5,)"),
        (["--text", "--regulariser", "0.1"], "`--regulariser` must be left out for text, got 0.1"),
        (["--triples", "--dropout", "0.1"], "`--dropout` must be left out for triples, got 0.1"),
        (["--label", "x"], "`label` must be left out except for"),
        (["--held-out", "none.svm"], "`held-out` must be a file that can be read, got none.svm: No such file"),
        (["--evaluate-every", "0"], "0 is not in the range"),
        (["--checkpoint-every", "-1"], "-1.0 is not in the range"),
        (["--log", "paper"], "'paper' is not"),
        (["--slow"], "No such option"),
    ],
)
def test_a_bad_option_of_fit_is_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    problems.write_features(tmp_path)
    assert run("fit", "rows.svm", "--out", "model", "--no-report", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("manyclass: ")
    assert message in error
    assert error.count("\n") == 1
    assert files(tmp_path) in (["rows.svm"], ["model", "rows.svm"])
    if (tmp_path / "model").exists():
        assert files(tmp_path / "model") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit"], "Missing option '--out'"),
        (["fit", "--out", "m"], "`DATA` must be given: the file to train on"),
        (["fit", "none.svm", "--out", "m"], "`data` must be a file that can be read, got none.svm: No such file"),
        (["fit", "none", "--out", "m"], "`data` must be of a format that ends in one of .svm"),
        (["fit", "none", "--text", "--out", "m"], "`data` must be a file that can be read, got none: No such file"),
        (["fit", "none", "--sequences", "--out", "m"], "`data` must be a file that can be read, got none: No such"),
        (["fit", "none", "--triples", "--out", "m"], "`data` must be a file that can be read, got none: No such"),
        (["fit", ".", "--text", "--out", "m"], "a folder with train.txt, got ., which has none"),
        (["fit", "rows.svm", "--out", "rows.svm"], "`--out` must be a folder that can be made, got rows.svm"),
        (["fit", "--out", "none", "--resume"], "`MODEL` must be a folder that `manyclass fit` made, got none"),
        (["evaluate", "none", "rows.svm"], "`MODEL` must be a folder that `manyclass fit` made, got none"),
        (["predict", "none", "rows.svm"], "`MODEL` must be a folder that `manyclass fit` made, got none"),
        (["info", "none"], "`MODEL` must be a folder that `manyclass fit` made, got none"),
        (["info", "."], "cannot read newest.safetensors: there is no such file"),
        (["info"], "Missing argument 'MODEL'"),
        (["evaluate", "none"], "Missing argument 'DATA'"),
        (["predict", "none", "rows.svm", "--probabilities", "estimated"], "must be exact or none without `--index`"),
        (["predict", "none", "rows.svm", "--top", "0"], "0 is not in the range"),
        (["predict", "none", "rows.svm", "--draws", "3"], "3 is not in the range"),
        (["predict", "none", "rows.svm", "--recall", "1.5"], "1.5 is not in the range"),
        (["predict", "none", "rows.svm", "--device", "nowhere"], "`device` must be one that torch finds here"),
        (["evaluate", "none", "rows.svm", "--checkpoint", "worst"], "'worst' is not one of"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    problems.write_features(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    left = set(files(tmp_path)) - {"rows.svm"}
    assert left <= {"m"}
    assert not left or files(tmp_path / "m") == []


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("features", ["none.svm"], "`data` must be a file that can be read, got none.svm: No such file"),
        ("text", ["none.txt"], "`data` must be a file that can be read, got none.txt: No such file"),
        ("sequences", ["none.tsv"], "`data` must be a file that can be read, got none.tsv: No such file"),
        ("triples", ["none.tsv"], "`data` must be a file that can be read, got none.tsv: No such file"),
        ("text", ["rows.svm", "--label", "x"], "`--label` must be left out for text, got x"),
        ("triples", ["rows.svm"], "in line 1 of rows.svm"),
        ("sequences", ["graph/train.txt"], "`data` must hold user and item in each line, got"),
        ("features", ["rows.csv"], "rows.csv"),
        ("text", ["."], "`data` must be a file, got the folder ."),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_data_that_a_model_cannot_read_is_one_line(
    trained, monkeypatch, capsys, tmp_path, command, kind, arguments, message
):
    _, out, _ = trained(kind)
    monkeypatch.chdir(tmp_path)
    problems.write_features(tmp_path)
    problems.write_triples(tmp_path)
    (tmp_path / "rows.csv").write_text("x,y\n1,2\n")
    assert run(command, out, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_existing_model_is_not_overwritten(tmp_path, capsys):
    data, out = problems.write_features(tmp_path), tmp_path / "model"
    assert fit("features", data, out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    assert fit("features", data, out) == 2
    message = f"`--out` must be a folder without a model, got {out}, which has fit.json: --resume goes on with it"
    assert capsys.readouterr().err == f"manyclass: {message}\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_library_that_is_missing_is_named_before_any_work(tmp_path, capsys, monkeypatch):
    data = problems.write_features(tmp_path)
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "plotly" else find(name))
    assert run("fit", data, "--out", tmp_path / "model") == 2
    assert capsys.readouterr().err == "manyclass: a report needs plotly: pip install 'manyclass[report]'\n"
    assert not (tmp_path / "model").exists()


def test_a_bug_keeps_its_traceback(trained, tmp_path, monkeypatch):
    _, out, data = trained("features")
    monkeypatch.setattr("manyclass.tasks.measure", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("evaluate", out, data)
