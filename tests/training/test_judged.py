"""What is added to a loss, what the best is the best by, when it is looked for, and where the time goes."""

import math
import time

import pytest
import torch

from manyclass.training import (
    Callback,
    Checkpoints,
    DivergedError,
    HeldOut,
    Probe,
    Progress,
    Record,
    Training,
    load_checkpoint,
)
from manyclass.training.history import cost
from tests.training.problem import B, assert_same, batches, model, parameters, trained


def run(*, penalty=None, lr=0.05, **options):
    encoder, head = model()
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=lr)
    added = None if penalty is None else lambda batch: penalty(encoder, head, batch)
    training = Training(head, batches(), optimizer, encoder=encoder, epochs=2, report_every=1, penalty=added, **options)
    return encoder, head, training.run()


def test_a_penalty_is_what_is_added_to_the_loss():
    encoder, head = model()
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=0.05)
    draws = torch.Generator().manual_seed(0)
    for inputs, target in batches() * 2:
        optimizer.zero_grad()
        loss = head(encoder(inputs), target, generator=draws)
        (loss + 0.1 * head.weight.square().sum() + 0.01 * inputs.abs().mean() * encoder[0].weight.sum()).backward()
        optimizer.step()

    def penalty(encoder, head, batch):
        return 0.1 * head.weight.square().sum() + 0.01 * batch.inputs.abs().mean() * encoder[0].weight.sum()

    assert_same((encoder, head), run(penalty=penalty)[:2])


def test_records_tell_the_loss_without_it():
    plain, heavy = (run(penalty=penalty)[2] for penalty in (None, lambda encoder, head, batch: torch.tensor(1e6)))
    assert [record.loss for record in plain.records] == [record.loss for record in heavy.records]


def test_a_penalty_of_nothing_changes_nothing():
    assert_same(run()[:2], run(penalty=lambda encoder, head, batch: 0 * head.weight.sum())[:2])


class Counts:
    """A metric that is each time what comes next."""

    def __init__(self, *values):
        self.values = list(values)

    def __call__(self, hidden, batch):
        if batch.target.numel() == B:
            return torch.full(batch.target.shape, self.values.pop(0), dtype=torch.float64)
        raise AssertionError


def judged(*values, **options):
    held_out = HeldOut(batches(1), metrics={"score": Counts(*values)}, **options)
    return trained(epochs=len(values), held_out=held_out)[2]


def test_the_best_is_the_best_by_what_is_asked_for():
    history = judged(1.0, 5.0, 3.0, 4.0, by="score")
    assert history.best_step == 16
    at = next(record for record in history.records if record.step == 16 and record.held_out_loss is not None)
    assert history.best_loss == at.held_out_loss
    # Its losses fall all the time.
    assert judged(1.0, 5.0, 3.0, 4.0).best_step == 32


def test_patience_is_of_what_is_asked_for():
    history = judged(5.0, 1.0, 2.0, 9.0, by="score", patience=2)
    assert history.stopped == "patience"
    assert history.progress.epoch == 3


def test_a_score_that_is_nan_is_never_the_best():
    assert judged(math.nan, 1.0, math.nan, by="score").best_step == 16


def test_an_unknown_judge_is_refused():
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


def test_checkpoints_keep_the_best_by_what_is_asked_for(tmp_path):
    now = {"number": 0}
    checkpoints = Checkpoints(tmp_path, lambda training: now, model=lambda: now, by="score")
    best = []
    for number, (loss, score) in enumerate([(3.0, 0.1), (2.0, 0.4), (1.0, 0.2), (5.0, 0.5)], 1):
        now["number"] = number
        checkpoints.on_record(None, Record(number, 0, 1, 0.0, 1.0, held_out_loss=loss, metrics={"score": score}))
        best.append(load_checkpoint(tmp_path, "best")[0]["number"])
    assert best == [1, 2, 2, 4]


class Slow(Callback):
    def on_step(self, training):
        time.sleep(0.004)


def test_time_is_told_by_what_it_was_spent_on():
    class Waits:
        def __iter__(self):
            for item in batches(4):
                time.sleep(0.01)
                yield item

    def slow(hidden, batch):
        time.sleep(0.02)
        return 0.0 * batch.target

    held_out = HeldOut(batches(1), metrics={"slow": slow})
    started = time.perf_counter()
    spent = trained(Waits(), epochs=2, held_out=held_out, probe=Probe(every=2), callbacks=[Slow()])[2].spent
    whole = time.perf_counter() - started
    assert set(spent) == {"batches", "forward", "update", "evaluation", "probes", "callbacks"}
    assert spent["batches"] >= 8 * 0.01
    assert spent["evaluation"] >= 2 * 0.02
    assert spent["callbacks"] >= 8 * 0.004
    assert sum(spent.values()) <= whole


def test_time_spent_goes_on_with_a_training():
    encoder, head = model()
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=0.05)
    first = Training(head, batches(), optimizer, encoder=encoder, epochs=1)
    spent = first.run().spent
    second = Training(head, batches(), optimizer, encoder=encoder, epochs=2)
    second.load_state_dict(first.state_dict())
    again = second.run().spent
    assert all(again[name] > spent[name] for name in ("batches", "forward", "update"))


def test_evaluations_may_be_some_seconds_apart(monkeypatch):
    clock = [0.0]

    def tick():
        clock[0] += 0.125
        return clock[0]

    held_out = HeldOut([], seconds=2.0)
    found = [held_out.is_due(Progress(seconds=s), Progress(seconds=s + 0.5)) for s in (0.0, 1.0, 1.5, 1.75, 2.0, 3.5)]
    assert found == [False, False, True, True, False, True]
    monkeypatch.setattr("manyclass.training.loop.time.perf_counter", tick)
    history = trained(epochs=2, held_out=HeldOut(batches(1), seconds=2.0))[2]
    *evaluated, last = [record for record in history.records if record.held_out_loss is not None]
    # Once in every two seconds of training; not at the end of each epoch, but at the end of all.
    assert [record.seconds // 2 for record in evaluated] == list(range(1, 1 + len(evaluated)))
    assert 2 <= len(evaluated) < 8
    assert last.step == 16


def test_seconds_and_steps_between_evaluations_exclude_each_other():
    with pytest.raises(ValueError, match="`seconds` must be None where `every` is given, got 2"):
        HeldOut([], every=5, seconds=2.0)
    with pytest.raises(ValueError, match="`seconds` must be finite and above 0, got 0"):
        HeldOut([], seconds=0.0)


def test_a_loss_that_is_not_finite_is_an_error_of_its_own():
    with pytest.raises(DivergedError):
        trained(lr=1e30, epochs=5)
    assert issubclass(DivergedError, ValueError)
