"""The content of the report of a training."""

from dataclasses import replace

import pytest

from manyclass import tasks
from manyclass.report import Figure, ReportTable
from tests.tasks.problems import KINDS, METRICS, fit

SECTIONS = [
    "Result",
    "Learning curves",
    "Error of the approximation",
    "Rare and frequent classes",
    "Time by phase",
]


def report(trained, kind):
    done = trained(kind)[0]
    return done, tasks.report_of(done.model, done.history, done.measured, done.summary)


def section(page, title):
    return next(section for section in page.sections if section.title == title).parts


@pytest.mark.parametrize("kind", KINDS)
def test_all_sections_are_there(trained, kind):
    done, page = report(trained, kind)
    assert [section.title for section in page.sections] == SECTIONS
    assert page.title == f"A model of {kind}"
    assert all(line[1:] in page.summary for line in done.summary)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_the_measurement(trained, kind):
    done, page = report(trained, kind)
    (table,) = section(page, "Result")
    output = dict(table.rows)
    assert output["held-out loss, exact"] == f"{done.measured.loss:.4f}"
    assert output["perplexity"] == f"{done.measured.perplexity:,.2f}"
    for name, value in done.measured.metrics.items():
        assert output[name] == f"{value:.4f}"
    by = {"sequences": " NDCG@10", "triples": " MRR"}.get(kind, "")
    assert output[f"best{by} at step"] == f"{done.history.best_step:,}"
    assert output["classes"] == str(len(done.model.names))


@pytest.mark.parametrize("kind", KINDS)
def test_curves_are_those_of_the_records(trained, kind):
    done, page = report(trained, kind)
    (figure,) = section(page, "Learning curves")
    steps, seconds, metrics = figure.panels
    evaluated = [record for record in done.history.records if record.held_out_loss is not None]
    for panel in (steps, seconds):
        training, held_out = panel.curves
        assert list(training.y) == [record.loss for record in done.history.records]
        assert list(held_out.y) == [record.held_out_loss for record in evaluated]
    assert list(steps.curves[1].x) == [record.step for record in evaluated]
    assert list(seconds.curves[1].x) == [record.seconds for record in evaluated]
    assert [curve.label for curve in metrics.curves] == METRICS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_rare_and_frequent_classes_have_a_row_each_band(trained, kind):
    done, page = report(trained, kind)
    figure, table = section(page, "Rare and frequent classes")
    assert isinstance(figure, Figure)
    assert [row[0] for row in table.rows] == [band.name for band in done.measured.bands]
    assert [row[2] for row in table.rows] == [f"{band.loss:.3f}" for band in done.measured.bands]
    # A logarithmic axis has no 0.
    assert all(x > 0 for panel in figure.panels for curve in panel.curves for x in curve.x)


def test_the_time_by_phase_is_complete(trained):
    done, page = report(trained, "text")
    (table,) = section(page, "Time by phase")
    assert isinstance(table, ReportTable)
    assert len(table.rows) == len(done.history.spent) >= 4
    assert sum(float(row[2].rstrip("%")) for row in table.rows) == pytest.approx(100, abs=4)
    assert not {row[0] for row in table.rows} & set(done.history.spent)


def test_the_error_is_that_of_the_probes_where_there_were_any(trained, tmp_path):
    done, _ = fit("features", tmp_path, options=tasks.RunOptions(probe_every=0))
    page = tasks.report_of(done.model, done.history, done.measured, done.summary)
    assert section(page, "Error of the approximation") == ["No probe was recorded. The sampler is Learned."]
    done, page = report(trained, "features")
    summary, sampler, figure = section(page, "Error of the approximation")
    assert sampler == "The sampler is Learned."
    assert summary == tasks.error_summary(done.history, done.model.spec.settings)
    probed = [record for record in done.history.records if record.rmse_log_z is not None]
    error, threshold = figure.panels[0].curves
    assert list(error.y) == [record.rmse_log_z for record in probed]
    assert len(probed) >= 4
    assert threshold.label == "too high above 0.2"
    assert list(threshold.x) == list(error.x)
    assert set(threshold.y) == {0.2}


def test_decisions_are_listed_in_order(trained):
    done = trained("features")[0]
    lines = ["step 4: too much; from now on all classes", "step 9: little; from now on the shared design, k = 8"]
    records = [replace(done.history.records[i], decision=line) for i, line in enumerate(lines)]
    history = replace(done.history, records=(*records, *done.history.records[2:]))
    page = tasks.report_of(done.model, history, done.measured, done.summary)
    assert section(page, "Error of the approximation")[3:] == lines
    # A training decides even if no probe is recorded.
    history = replace(history, records=tuple(replace(record, rmse_log_z=None) for record in history.records))
    page = tasks.report_of(done.model, history, done.measured, done.summary)
    assert section(page, "Error of the approximation")[1:] == lines


def test_notes_list_settings_and_limits(trained):
    done, page = report(trained, "text")
    output = " ".join(page.notes)
    assert "stopped by epochs" in output
    assert f"{done.history.progress.step:,} steps" in output
    assert "dim 16" in output
    assert "None" not in output
