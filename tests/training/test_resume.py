"""A training that is interrupted and resumed equals an uninterrupted one, bit for bit."""

import io
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from manyclass.training import HeldOut, Training
from tests.training.problems import Recorder, assert_same, batches, model, parameters


class Shuffled:
    """Batches in an order that depends on the number of the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        source = batches()
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(self.epoch))
        return (source[i] for i in order)


def loader():
    """Return a loader that shuffles by torch's global RNG."""
    inputs, target = (torch.cat(part) for part in zip(*batches(), strict=True))
    return DataLoader(TensorDataset(inputs, target), batch_size=20, shuffle=True)


class Setting:
    """A training with state in every part, which can be saved and loaded."""

    def __init__(self, source, callbacks=()):
        self.encoder, self.head = model(dropout=0.3)
        self.optimizer = torch.optim.Adam(parameters(self.encoder, self.head), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.7)
        self.training = Training(
            self.head,
            source,
            self.optimizer,
            encoder=self.encoder,
            schedulers=self.scheduler,
            epochs=4,
            held_out=HeldOut(batches(2, seed=1), every=3, restore_best=True),
            probe_every=5,
            report_every=2,
            callbacks=callbacks,
            seed=5,
        )

    def parts(self):
        return self.encoder, self.head, self.optimizer, self.scheduler, self.training

    def save(self):
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts()], file)
        return file.getvalue()

    def load(self, saved):
        for part, state in zip(self.parts(), torch.load(io.BytesIO(saved), weights_only=True), strict=True):
            part.load_state_dict(state)


def timeless(history):
    records = [replace(record, seconds=0.0, seconds_left=None) for record in history.records]
    return records, history.best_step, history.best_loss, history.stopped


@pytest.mark.parametrize("source", [batches, Shuffled, loader])
@pytest.mark.parametrize("after", [1, 7, 8, 13])
def test_resumed_is_uninterrupted(source, after):
    whole = Setting(source())
    expected = whole.training.run()
    left = Setting(source(), [Recorder(interrupt_after=after)])
    assert left.training.run().stopped == "interrupted"
    torch.rand(3)
    saved = left.save()
    torch.manual_seed(12345)
    resumed = Setting(source())
    resumed.load(saved)
    assert resumed.training.progress.step == after
    history = resumed.training.run()
    assert timeless(history) == timeless(expected)
    assert history.progress.seconds > left.training.progress.seconds
    assert_same((whole.encoder, whole.head), (resumed.encoder, resumed.head))
    for one, other in zip(*(setting.optimizer.state.values() for setting in (whole, resumed)), strict=True):
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


def test_an_interrupted_training_can_run_again():
    whole = Setting(loader())
    expected = whole.training.run()
    left = Setting(loader(), [Recorder(interrupt_after=10)])
    assert left.training.run().stopped == "interrupted"
    torch.rand(3)
    assert timeless(left.training.run()) == timeless(expected)
    assert_same((whole.encoder, whole.head), (left.encoder, left.head))


def test_what_is_saved_within_a_run_can_be_resumed():
    class Saves(Recorder):
        def on_step(self, training):
            if training.progress.step == 6:
                self.saved = setting.save()

    saves = Saves()
    setting = Setting(loader(), [saves])
    expected = setting.training.run()
    resumed = Setting(loader())
    resumed.load(saves.saved)
    assert timeless(resumed.training.run()) == timeless(expected)
    assert_same((setting.encoder, setting.head), (resumed.encoder, resumed.head))


def test_running_a_finished_training_changes_nothing():
    whole = Setting(batches())
    history = whole.training.run()
    assert whole.training.run() == history


def test_fewer_batches_than_were_seen_are_refused():
    left = Setting(batches(), [Recorder(interrupt_after=5)])
    left.training.run()
    resumed = Setting(batches(3))
    resumed.load(left.save())
    with pytest.raises(ValueError, match="`batches` must hold the 5 of this epoch that were seen before, got 3"):
        resumed.training.run()


def test_the_epoch_reaches_a_loader_s_sampler():
    class Sampler:
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    class Loader(list):
        sampler = Sampler()

    Setting(Loader(batches())).training.run()
    assert Sampler.epochs == [0, 1, 2, 3]
