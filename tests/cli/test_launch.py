"""Training and evaluation on the processes of torchrun, against one process."""

import csv
import json
import re
import signal
import subprocess
import time

import pytest

from manyclass.errors import UserError
from manyclass.training import Ranks, load_checkpoint
from tests.cli.command import FLAGS, options, run
from tests.cli.launched import ENVIRONMENT, together, torchrun
from tests.soak.commands import ROOT
from tests.tasks import problems

SAME = ("--no-report", "--sampler", "exact", "--evaluated", 50)
# Without dropout and draws, two processes differ from one by rounding alone.
STEADY = {kind: () if kind in ("features", "triples") else ("--dropout", 0) for kind in problems.KINDS}
# The last batch has one example, so that a process has none.
BATCH = {"features": 13, "text": 5, "sequences": 59, "triples": 199}


def steady(kind):
    given = {name: value for name, value in problems.SETTINGS[kind].to_json().items() if name not in ("k", "dropout")}
    settings = problems.tasks.Settings(**{**given, "epochs": 2, "batch_size": BATCH[kind]})
    return (*FLAGS[kind], *options(settings), *STEADY[kind], *SAME)


def rows(out):
    with (out / "log.csv").open() as file:
        found = list(csv.DictReader(file))
    for row in found:
        del row["seconds"]
    return [{name: float(value) for name, value in row.items() if value} for row in found]


def same_rows(one, other):
    first, second = rows(one), rows(other)
    assert [row["step"] for row in first] == [row["step"] for row in second]
    for expected, row in zip(first, second, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Return a folder with trainings of one process and of two, and the results of the commands of two processes."""
    folder = tmp_path_factory.mktemp("launched")
    data = {kind: write(folder) for kind, write in problems.WRITERS.items()}
    commands = {}
    for kind in problems.KINDS:
        assert run("fit", data[kind], "--out", folder / f"{kind}-1", *steady(kind)) == 0
        commands[f"fit {kind}"] = ("fit", data[kind], "--out", folder / f"{kind}-2", *steady(kind))
        source = problems.to_evaluate(kind, data[kind])
        measured = folder / f"{kind}-2.json"
        commands[f"evaluate {kind}"] = ("evaluate", folder / f"{kind}-1", source, "--json", measured)
    part = ("fit", data["features"], "--out", folder / "part", *steady("features"))
    assert run(*part, "--epochs", 1) == 0
    again = ("fit", "--out", folder / "part", "--resume", "--no-report", "--epochs", 2)
    tiny = ("--epochs", 1, "--batch-size", 1)
    commands |= {
        "resume": again,
        "small batches": ("fit", data["sequences"], "--out", folder / "tiny-2", *steady("sequences"), *tiny),
        "draws": ("fit", data["text"], "--out", folder / "draws", "--text", "--k", 8, "--no-report", "--epochs", 1),
        "predict": ("predict", folder / "text-1", data["text"]),
        "sampler": ("fit", data["text"], "--out", folder / "no", "--text", "--sampler", "bernoulli", "--k", 8),
        "no data": ("fit", folder / "absent.svm", "--out", folder / "no"),
        "taken": ("fit", data["text"], "--out", folder / "text-1", "--text"),
        "device": ("fit", data["text"], "--out", folder / "no", "--text", "--device", "cpu:0"),
        "auto": (*part, "--auto-resume"),
    }
    assert run("fit", data["sequences"], "--out", folder / "tiny-1", *steady("sequences"), *tiny) == 0
    return folder, data, dict(zip(commands, together(folder, *commands.values()), strict=True))


@pytest.mark.parametrize("kind", problems.KINDS)
def test_two_processes_take_the_steps_of_one(launched, kind):
    folder, _, results = launched
    assert [result.code for result in results[f"fit {kind}"]] == [0, 0]
    same_rows(folder / f"{kind}-1", folder / f"{kind}-2")


def test_batches_of_one_example_are_trained_on(launched):
    folder, _, results = launched
    assert [result.code for result in results["small batches"]] == [0, 0]
    same_rows(folder / "tiny-1", folder / "tiny-2")


def test_a_training_by_draws_ends(launched):
    folder, _, results = launched
    assert [result.code for result in results["draws"]] == [0, 0]
    assert rows(folder / "draws")[-1]["held_out_loss"] < 3.5


@pytest.mark.parametrize("kind", problems.KINDS)
def test_two_processes_measure_the_same_as_one(launched, kind):
    folder, data, results = launched
    alone = folder / f"{kind}-1.json"
    assert run("evaluate", folder / f"{kind}-1", problems.to_evaluate(kind, data[kind]), "--json", alone) == 0
    assert [result.code for result in results[f"evaluate {kind}"]] == [0, 0]
    expected, found = (json.loads(path.read_text()) for path in (alone, folder / f"{kind}-2.json"))
    bands = zip(expected.pop("by_frequency"), found.pop("by_frequency"), strict=True)
    for one, other in [(expected, found), *bands]:
        assert one.pop("count", None) == other.pop("count", None)
        assert other == pytest.approx(one, rel=1e-5)


def test_one_process_uses_what_two_have_trained(launched, capsys):
    folder, data, _ = launched
    assert run("info", folder / "text-2") == 0
    assert run("evaluate", folder / "text-2", data["text"] / "valid.txt") == 0
    assert "perplexity" in capsys.readouterr().out
    assert run("predict", folder / "text-2", data["text"] / "valid.txt", "--out", folder / "predicted") == 0


def test_a_training_goes_on_with_two_processes_and_with_one_again(launched):
    folder, data, results = launched
    assert [result.code for result in results["resume"]] == [0, 0]
    assert run("fit", "--out", folder / "part", "--resume", "--no-report", "--epochs", 3) == 0
    assert run("fit", data["features"], "--out", folder / "whole", *steady("features"), "--epochs", 3) == 0
    # The last record of an epoch that ended the training is repeated.
    found, expected = ({row["step"]: row for row in rows(folder / name)} for name in ("part", "whole"))
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, rel=1e-4, abs=1e-4)


def test_the_first_process_alone_prints(launched):
    _, _, results = launched
    for kind in problems.KINDS:
        for command in ("fit", "evaluate"):
            first, second = results[f"{command} {kind}"]
            assert "perplexity" in first.out
            assert (second.out, second.err) == ("", "")
    assert "stopped (epochs)" in results["fit text"][0].err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("predict", "`predict` must be run by one process, got 2 by torchrun"),
        ("sampler", "`sampler` must be one whose classes can be divided among processes"),
        ("no data", "absent.svm"),
        ("taken", "`--out` must be a folder without a model"),
        ("device", "`--device` must be cpu or cuda under torchrun"),
    ],
)
def test_errors_name_their_rank_on_every_process(launched, command, message):
    _, _, results = launched
    for rank, result in enumerate(results[command]):
        assert result.code == 2
        assert result.err.startswith("manyclass, rank 1: " if rank else "manyclass: ")
        assert result.err.count("\n") == 1
        assert message in result.err


def test_auto_resume_goes_on_where_there_is_a_training(launched):
    _, _, results = launched
    assert [result.code for result in results["auto"]] == [0, 0]
    assert "stopped (epochs) after 36 steps" in results["auto"][0].err


def test_an_interrupt_ends_all_processes_with_a_checkpoint(launched):
    folder, data, _ = launched
    out = folder / "interrupted"
    arguments = (
        "fit",
        data["features"],
        "--out",
        out,
        *steady("features"),
        "--epochs",
        100_000,
        "--checkpoint-every",
        0,
    )
    agent = subprocess.Popen(
        torchrun("manyclass", *arguments), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(out / "previous.safetensors", agent)
        agent.send_signal(signal.SIGINT)
        _, err = agent.communicate(timeout=60)
    finally:
        agent.kill()
    (step,) = re.findall(r"manyclass: interrupted after step ([\d,]+); all of it is saved", err)
    assert "rank 1" not in err
    saved = load_checkpoint(out, "newest")[0]["training"]["progress"]["step"]
    assert saved == int(step.replace(",", ""))


def wait_for(path, process):
    begin = time.monotonic()
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() - begin < 60
        time.sleep(0.05)


def test_one_rank_alone_needs_no_process_group():
    ranks = Ranks()
    assert (ranks.is_first, ranks.are_several) == (True, False)
    assert ranks.total(2, 0.5) == [2, 0.5]
    assert ranks.in_turn(lambda: 3) == ranks.by_first(lambda: 3) == 3
    with pytest.raises(UserError, match="full"):
        ranks.together(lambda: (_ for _ in ()).throw(UserError("the disk is full")))
