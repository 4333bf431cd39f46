"""The criterion by which an evaluation is the best, for patience and for checkpoints."""

import math

import pytest
import torch

from manyclass.training import Checkpoints, HeldOut, Record, load_checkpoint
from manyclass.training.history import cost
from tests.training.problems import B, batches, trained


class Counts:
    """A metric that takes given values in turn."""

    def __init__(self, *values):
        self.values = list(values)

    def __call__(self, hidden, batch):
        if batch.target.numel() == B:
            return torch.full(batch.target.shape, self.values.pop(0), dtype=torch.float64)
        raise AssertionError


def judged(*values, **options):
    held_out = HeldOut(batches(1), metrics={"score": Counts(*values)}, **options)
    return trained(epochs=len(values), held_out=held_out)[2]


def test_the_best_evaluation_follows_the_criterion():
    history = judged(1.0, 5.0, 3.0, 4.0, by="score")
    assert history.best_step == 16
    at = next(record for record in history.records if record.step == 16 and record.held_out_loss is not None)
    assert history.best_loss == at.held_out_loss
    # The losses fall all the time.
    assert judged(1.0, 5.0, 3.0, 4.0).best_step == 32


def test_patience_follows_the_criterion():
    history = judged(5.0, 1.0, 2.0, 9.0, by="score", patience=2)
    assert history.stopped == "patience"
    assert history.progress.epoch == 3


def test_a_score_that_is_nan_is_never_the_best():
    assert judged(math.nan, 1.0, math.nan, by="score").best_step == 16


def test_an_unknown_criterion_is_refused():
    with pytest.raises(ValueError, match=r"`by` must be .*'loss'.*'score'.*, got 'beauty'"):
        HeldOut(batches(1), metrics={"score": Counts()}, by="beauty")


@pytest.mark.parametrize(
    ("options", "by", "expected"),
    [
        ({"held_out_loss": 2.0}, "loss", 2.0),
        ({"held_out_loss": 2.0, "metrics": {"score": 0.5}}, "score", -0.5),
        ({"held_out_loss": 2.0}, "score", math.inf),
        ({}, "loss", math.inf),
        ({"held_out_loss": math.nan}, "loss", math.inf),
    ],
)
def test_the_cost_of_a_record(options, by, expected):
    assert cost(Record(1, 0, 1, 0.0, 1.0, **options), by) == expected


def test_checkpoints_keep_the_best_by_the_criterion(tmp_path):
    now = {"number": 0}
    checkpoints = Checkpoints(tmp_path, lambda training: now, model=lambda: now, by="score")
    best = []
    for number, (loss, score) in enumerate([(3.0, 0.1), (2.0, 0.4), (1.0, 0.2), (5.0, 0.5)], 1):
        now["number"] = number
        checkpoints.on_record(None, Record(number, 0, 1, 0.0, 1.0, held_out_loss=loss, metrics={"score": score}))
        best.append(load_checkpoint(tmp_path, "best")[0]["number"])
    assert best == [1, 2, 2, 4]
