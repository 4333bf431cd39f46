"""The sentence on the error of log Z̃ at the end of a training."""

import pytest

from manyclass import tasks
from manyclass.training import History, Progress, Record

ADVICE = (
    "rare classes may be trained wrongly. Leave --sampler and --k out, or take a larger --k, --sampler tailored or "
    "--sampler exact"
)


def summary(*errors):
    records = [Record(i + 1, 0, i + 1, 0.1, 2.0, rmse_log_z=error) for i, error in enumerate(errors)]
    return tasks.error_summary(History(tuple(records), Progress(), None, None, "epochs"))


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
    assert summary(1.0, error, None) == line
