"""Ctrl-C ends a training between steps, and is never lost."""

import signal

import torch

from manyclass.training import HeldOut, Training
from tests.training.problems import Recorder, assert_same, batches, model, trained


def test_an_interrupt_ends_a_training_after_the_step():
    recorder = Recorder(interrupt_after=5)
    encoder, _, history = trained(epochs=2, report_every=2, callbacks=[recorder])
    assert history.stopped == "interrupted"
    assert [record.step for record in history.records] == [2, 4]
    assert history.progress.step == 5
    assert recorder.log[-1] == "end"
    assert recorder.history == history
    assert_same([encoder], [trained(steps=5)[0]])


def test_ctrl_c_waits_for_the_end_of_the_step():
    class Press(torch.nn.Module):
        def forward(self, inputs):
            signal.raise_signal(signal.SIGINT)
            return inputs

    head = model()[1]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    training = Training(head, batches(), optimizer, encoder=Press(), epochs=2)
    before = head.weight.clone()
    history = training.run()
    assert (history.stopped, history.progress.step) == ("interrupted", 1)
    assert not torch.equal(before, head.weight)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_evaluation_counts():
    def pressed(hidden, batch):
        signal.raise_signal(signal.SIGINT)
        return torch.zeros(batch.target.shape)

    _, _, history = trained(epochs=1, held_out=HeldOut(batches(1), metrics={"none": pressed}))
    assert history.stopped == "interrupted"
    assert history.records[-1].held_out_loss is not None
