"""The sentence on the error of log Z̃ at the end of a training."""

import pytest

from manyclass import tasks
from manyclass.training import History, Progress, Record

WRONGLY = "rare classes may be trained wrongly"
ADVICE = f"{WRONGLY}. Leave --sampler and --k out, or take a larger --k, --sampler tailored or --sampler exact"


def summary(*errors, **settings):
    records = [Record(i + 1, 0, i + 1, 0.1, 2.0, rmse_log_z=error) for i, error in enumerate(errors)]
    return tasks.error_summary(History(tuple(records), Progress(), None, None, "epochs"), tasks.Settings(**settings))


@pytest.mark.parametrize("errors", [(), (None, None)])
def test_nothing_is_said_if_nothing_was_measured(errors):
    assert summary(*errors) is None


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (0.0, "error of log Z̃ at the end: 0, all classes were scored"),
        (0.0437, "error of log Z̃ at the end: 0.044 nats"),
        (0.2, "error of log Z̃ at the end: 0.2 nats"),
        (0.21, f"error of log Z̃ at the end: 0.21 nats, which is too high: {ADVICE}"),
        (0.5, f"error of log Z̃ at the end: 0.5 nats, which is too high: {ADVICE}"),
        (3.46, f"error of log Z̃ at the end: 3.5 nats, which is much too high: {ADVICE}"),
    ],
)
def test_an_error_above_the_threshold_is_called_too_high(error, line):
    # Only the last figure counts, and later records without one do not hide it.
    assert summary(1.0, error, None, sampler="learned") == line
    assert summary(1.0, error, None, k=64) == line


def test_the_default_is_not_told_to_be_the_default():
    too_high = f"error of log Z̃ at the end: 0.3 nats, which is too high: {WRONGLY}"
    assert summary(0.3) == f"{too_high}. Train longer, so that the sampler can adapt, or take --sampler exact"


def test_the_chosen_error_decides_what_is_too_high():
    assert summary(0.3, rmse_log_z=0.5) == "error of log Z̃ at the end: 0.3 nats"
    assert "too high" in summary(0.1, rmse_log_z=0.05)
