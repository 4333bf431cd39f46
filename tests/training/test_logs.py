"""The progress line and the CSV log."""

import csv
import io

import pytest

from manyclass.errors import NotSavedWarning
from manyclass.training import CSVLog, HeldOut, History, Progress, ProgressLine, Record
from tests.training.problems import batches, trained

COLUMNS = ["step", "epoch", "examples", "seconds", "loss", "held_out_loss", "rmse_log_z", "decision"]


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def record(step, **options):
    return Record(step, 0, 100 * step, 0.5 * step, 2.5, **options)


def history(**options):
    return History(**{"records": (), "progress": Progress(step=1200), "best_step": None, "best_loss": None, **options})


def test_the_log_has_a_row_for_each_record(tmp_path):
    path = tmp_path / "log.csv"
    held_out = HeldOut(batches(1), metrics={"zero": lambda hidden, batch: 0 * batch.target})
    records = trained(
        epochs=2,
        report_every=3,
        held_out=held_out,
        probe_every=6,
        callbacks=[CSVLog(path, metrics=("zero", "other"))],
    )[2].records
    written = rows(path)
    assert list(written[0]) == [*COLUMNS, "zero", "other"]
    assert [int(row["step"]) for row in written] == [3, 6, 8, 9, 12, 15, 16]
    for row, kept in zip(written, records, strict=True):
        assert float(row["loss"]) == kept.loss
        assert row["held_out_loss"] == ("" if kept.held_out_loss is None else str(kept.held_out_loss))
        assert row["rmse_log_z"] == ("" if kept.rmse_log_z is None else str(kept.rmse_log_z))
        assert row["zero"] == ("" if kept.held_out_loss is None else "0.0")
        assert row["other"] == ""


def test_a_row_is_flushed_at_once_and_the_file_is_opened_at_the_first_record(tmp_path):
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    assert not path.exists()
    log.on_record(None, record(1))
    assert len(rows(path)) == 1
    log.on_end(None, history(stopped="steps"))


def test_rows_are_appended_to_an_existing_log(tmp_path):
    path = tmp_path / "log.csv"
    for step in (1, 2):
        log = CSVLog(path)
        log.on_record(None, record(step))
        log.on_end(None, history(stopped="steps"))
    assert [row["step"] for row in rows(path)] == ["1", "2"]
    assert path.read_text().count("step") == 1
    # The writer was killed within a row, and resumes at the fourth step.
    path.write_text(path.read_text() + "3,0,3")
    log = CSVLog(path)
    log.on_record(None, record(4))
    log.on_end(None, history(stopped="steps"))
    assert [row["step"] for row in rows(path)] == ["1", "2", "4"]


def test_rows_of_repeated_steps_are_replaced(tmp_path):
    path = tmp_path / "log.csv"
    for steps, loss in (((1, 2, 3), 2.0), ((2, 4), 1.0)):
        log = CSVLog(path)
        for step in steps:
            log.on_record(None, record(step, held_out_loss=loss))
        log.on_end(None, history(stopped="steps"))
    assert [(row["step"], row["held_out_loss"]) for row in rows(path)] == [("1", "2.0"), ("2", "1.0"), ("4", "1.0")]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_rows_refused_by_a_full_disk_are_written_later(tmp_path, monkeypatch):
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    log.on_record(None, record(1))
    with monkeypatch.context() as full:
        full.setattr(log, "_file", open("/dev/full", "w"))  # noqa: SIM115
        full.setattr(log, "_open", lambda step: open("/dev/full", "w"))  # noqa: SIM115
        with pytest.warns(NotSavedWarning, match=r"cannot write .*log.csv: No space left on device. Rows follow later"):
            log.on_record(None, record(2))
        # There is one warning only.
        log.on_record(None, record(3))
    assert len(rows(path)) == 1
    log.on_record(None, record(4))
    log.on_end(None, history(stopped="steps"))
    assert [row["step"] for row in rows(path)] == ["1", "2", "3", "4"]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_log_of_binary_data_is_refused(tmp_path):
    (tmp_path / "log.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"`path` must be text, got other bytes in .*log.csv"):
        CSVLog(tmp_path / "log.csv").check()


def test_a_log_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,accuracy\n")
    with pytest.raises(ValueError, match=r"`path` must have the columns \['step', .*got \['step', 'accuracy'\]"):
        CSVLog(path).on_record(None, record(1))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(line):
    line.on_record(None, record(1000, seconds_left=75.0))
    line.on_record(None, record(1100, held_out_loss=2.25, metrics={"accuracy": 0.125}, seconds_left=4000.0))
    line.on_record(None, record(1200, rmse_log_z=0.0625))
    line.on_end(None, history(best_step=1100, best_loss=2.25, stopped="interrupted"))


def test_a_file_gets_plain_lines():
    file = io.StringIO()
    show(ProgressLine(file=file, every=0))
    assert file.getvalue().splitlines() == [
        "step 1,000  epoch 0  200 examples/s  loss 2.5000  1:15 left",
        "step 1,100  epoch 0  200 examples/s  loss 2.5000  held-out loss 2.2500  accuracy 0.125  1:06:40 left",
        "step 1,200  epoch 0  200 examples/s  loss 2.5000  held-out loss 2.2500  error of log Z 0.062",
        "stopped (interrupted) after 1,200 steps, best at step 1,100: held-out loss 2.2500",
    ]


def test_the_last_line_names_the_metric_of_the_best_model():
    file = io.StringIO()
    ProgressLine(file=file).on_end(
        None, history(best_step=1100, best_loss=2.25, best_by="NDCG@10", stopped="interrupted")
    )
    assert file.getvalue() == (
        "stopped (interrupted) after 1,200 steps, best NDCG@10 at step 1,100: held-out loss 2.2500\n"
    )


def test_a_file_gets_few_lines_without_an_evaluation():
    file = io.StringIO()
    show(ProgressLine(file=file, every=1000))
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()[:-1]] == ["step 1,100"]


def test_a_terminal_gets_one_line_in_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = Terminal()
    show(ProgressLine(file=file))
    first, second, third = file.getvalue().split("\r")[1:]
    assert first.endswith("1:15 left\x1b[K")
    assert second.endswith("1:06:40 left\x1b[K\n")
    assert third.split("\x1b[K")[1].startswith("\nstopped")


DECISION = "step 1,100: the error of log Z̃ is 0.6, and more; from now on all classes"


def test_a_decision_has_a_line_of_its_own_in_a_file():
    file = io.StringIO()
    line = ProgressLine(file=file, every=1000)
    line.on_record(None, record(1000))
    line.on_record(None, record(1100, decision=DECISION))
    assert file.getvalue() == f"{DECISION}\n"
    line.on_record(None, record(1100, held_out_loss=2.25, decision=DECISION))
    assert file.getvalue().splitlines()[1] == DECISION
    assert file.getvalue().splitlines()[2].startswith("step 1,100  epoch 0")


def test_a_decision_has_a_line_of_its_own_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    file = Terminal()
    line = ProgressLine(file=file)
    line.on_record(None, record(1000))
    line.on_record(None, record(1100, decision=DECISION))
    first, second, third = file.getvalue().split("\r")[1:]
    # It takes the place of the progress line, which follows below it, and is never cut.
    assert first.startswith("step 1,000")
    assert second == f"\x1b[K{DECISION}\n"
    assert third.startswith("step 1,100")


def test_a_decision_is_a_column_of_the_log(tmp_path):
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    for step, decision in ((1000, None), (1100, DECISION)):
        log.on_record(None, record(step, decision=decision))
    log.on_end(None, history(stopped="steps"))
    assert [row["decision"] for row in rows(path)] == ["", DECISION]


def test_a_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    file = Terminal()
    ProgressLine(file=file).on_record(None, record(1000))
    assert file.getvalue() == "\rstep 1,000  epoch 0  200 exam\x1b[K"


def test_progress_is_printed_to_the_standard_error(capsys):
    trained(epochs=1, held_out=HeldOut(batches(1)), callbacks=[ProgressLine()])
    out, err = capsys.readouterr()
    assert out == ""
    assert "held-out loss" in err
    assert "stopped (epochs) after 8 steps" in err
