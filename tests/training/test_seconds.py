"""Seconds of a training: by phase, between evaluations, and without evaluations."""

import pytest
import torch

from manyclass.training import Callback, HeldOut, Progress, Training
from tests.training.problems import batches, model, parameters, trained


def test_time_is_reported_by_phase(clock):
    class Slow(Callback):
        def on_step(self, training):
            clock.sleep(0.004)

    class Waits:
        def __iter__(self):
            for item in batches(4):
                clock.sleep(0.01)
                yield item

    def slow(hidden, batch):
        clock.sleep(0.02)
        return 0.0 * batch.target

    held_out = HeldOut(batches(1), metrics={"slow": slow})
    started = clock()
    spent = trained(Waits(), epochs=2, held_out=held_out, probe_every=2, callbacks=[Slow()])[2].spent
    whole = clock() - started
    assert set(spent) == {"batches", "forward", "update", "evaluation", "callbacks"}
    assert spent["batches"] >= 8 * 0.01
    assert spent["evaluation"] >= 2 * 0.02
    assert spent["callbacks"] >= 8 * 0.004
    assert sum(spent.values()) <= whole


def test_time_spent_goes_on_with_a_training(clock):
    encoder, head = model()
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=0.05)
    first = Training(head, batches(), optimizer, encoder=encoder, epochs=1)
    spent = first.run().spent
    second = Training(head, batches(), optimizer, encoder=encoder, epochs=2)
    second.load_state_dict(first.state_dict())
    again = second.run().spent
    assert all(again[name] > spent[name] for name in ("batches", "forward", "update"))


def test_evaluations_may_be_some_seconds_apart(clock):
    clock.tick = 0.125
    held_out = HeldOut([], seconds=2.0)
    found = [held_out.is_due(Progress(seconds=s), Progress(seconds=s + 0.5)) for s in (0.0, 1.0, 1.5, 1.75, 2.0, 3.5)]
    assert found == [False, False, True, True, False, True]
    history = trained(epochs=2, held_out=HeldOut(batches(1), seconds=2.0))[2]
    *evaluated, last = [record for record in history.records if record.held_out_loss is not None]
    # There is one evaluation every two seconds of training and one at the end, but none per epoch.
    assert [record.seconds // 2 for record in evaluated] == list(range(1, 1 + len(evaluated)))
    assert 2 <= len(evaluated) < 8
    assert last.step == 16


def test_seconds_and_steps_between_evaluations_exclude_each_other():
    with pytest.raises(ValueError, match="`seconds` must be None if `every` is given, got 2"):
        HeldOut([], every=5, seconds=2.0)
    with pytest.raises(ValueError, match="`seconds` must be finite and above 0, got 0"):
        HeldOut([], seconds=0.0)


def test_evaluations_do_not_count_as_seconds(clock):
    def slow(hidden, batch):
        clock.sleep(0.2)
        return batch.target

    history = trained(steps=4, held_out=HeldOut(batches(1), every=1, metrics={"slow": slow}))[2]
    assert history.progress.seconds < 0.5
