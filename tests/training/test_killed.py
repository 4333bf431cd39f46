"""A training that is killed or interrupted and then resumed equals an uninterrupted one."""

import functools

import pytest
import torch

from manyclass.training import load_checkpoint
from tests.storage.trees import same
from tests.training.killed import Setting, killed_and_resumed, outcome, timeless
from tests.training.problems import Recorder


@functools.cache
def whole(folder):
    setting = Setting(folder / "whole", every=1e9)
    setting.training.run()
    return timeless(setting.state()), outcome(folder / "whole")


# A rebuild of the sampler's table starts at step 50 and is taken over at 63; epochs end at 20 and 60.
@pytest.mark.parametrize("after", [1, 20, 33, 50, 57, 62, 63, 69])
def test_resumed_is_uninterrupted(tmp_path, tmp_path_factory, after):
    left = Setting(tmp_path / "left", every=1e9, callbacks=[Recorder(interrupt_after=after)])
    assert left.training.run().stopped == "interrupted"
    torch.manual_seed(12345)
    resumed = Setting(tmp_path / "left", every=1e9).resume()
    assert resumed.training.progress.step == after
    resumed.training.run()
    state, left_behind = whole(tmp_path_factory.getbasetemp())
    assert same(timeless(resumed.state()), state)
    assert same(outcome(tmp_path / "left"), left_behind)


def test_a_checkpoint_saved_within_a_run_can_be_resumed(tmp_path):
    setting = Setting(tmp_path, every=0.0)
    setting.training.run()
    expected = outcome(tmp_path)
    assert load_checkpoint(tmp_path, "previous")[0]["training"]["progress"]["step"] == 70
    # This is the checkpoint before the newest.
    for path in ("best.safetensors", "newest.safetensors"):
        (tmp_path / path).unlink()

    class Dies(Recorder):
        def on_step(self, training):
            assert training.progress.step < 41

    dying = Setting(tmp_path, callbacks=[Dies()])
    with pytest.raises(AssertionError):
        dying.training.run()
    Setting(tmp_path, every=1e9).resume("previous").training.run()
    assert same(outcome(tmp_path), expected)


def test_a_training_that_is_killed_ends_as_one_that_is_not(tmp_path):
    assert killed_and_resumed(tmp_path, kills=2)["kills"] >= 2


def test_patience_and_the_best_parameters_survive(tmp_path):
    options = {"every": 1e9, "patience": 2, "restore_best": True, "steps": 10_000}
    whole = Setting(tmp_path / "whole", **options)
    expected = whole.training.run()
    assert expected.stopped == "patience"
    assert expected.best_step < expected.progress.step
    left = Setting(tmp_path / "left", **options, callbacks=[Recorder(interrupt_after=expected.best_step + 3)])
    left.training.run()
    resumed = Setting(tmp_path / "left", **options).resume()
    assert resumed.training.run().best_step == expected.best_step
    assert same(resumed.model(), whole.model())
    best, _ = load_checkpoint(tmp_path / "left", "best")
    assert same(best["head"]["weight"], whole.head.weight.detach())
    # The last checkpoint holds the last parameters, not the best, so that a training can be resumed.
    newest, _ = load_checkpoint(tmp_path / "left")
    assert not torch.equal(newest["head"]["weight"], whole.head.weight)
