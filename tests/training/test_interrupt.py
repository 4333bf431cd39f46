"""Ctrl-C ends a training between steps, and is never lost."""

import signal

import pytest
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


@pytest.fixture
def handlers():
    """Handlers of signals, set by the test and restored after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


class Press(torch.nn.Module):
    """An encoder that sends a signal in every step."""

    def __init__(self, number=signal.SIGINT):
        super().__init__()
        self.number = number

    def forward(self, inputs):
        signal.raise_signal(self.number)
        return inputs


@pytest.mark.parametrize("ignored", [False, True])
def test_a_sigterm_that_interrupts_waits_even_where_ctrl_c_is_ignored(handlers, ignored):
    handlers(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    handlers(signal.SIGTERM, signal.default_int_handler)
    head = model()[1]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    history = Training(head, batches(), optimizer, encoder=Press(signal.SIGTERM), epochs=2).run()
    assert (history.stopped, history.progress.step) == ("interrupted", 1)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_a_handler_of_the_application_is_left_alone(handlers):
    seen = []
    handlers(signal.SIGTERM, lambda *_: seen.append(True))
    head = model()[1]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    history = Training(head, batches(), optimizer, encoder=Press(signal.SIGTERM), steps=2).run()
    assert (history.stopped, seen) == ("steps", [True, True])


def test_ctrl_c_waits_for_the_end_of_the_step():
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
