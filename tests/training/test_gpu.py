"""On a GPU no step syncs with the device, and a training can be resumed."""

import pytest
import torch

from manyclass.training import Callback, HeldOut, Training
from tests.test_gpu import no_sync
from tests.training.problems import Recorder, batches, model, parameters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def setting(callbacks=(), **options):
    encoder, head = (module.cuda() for module in model(dropout=0.3))
    optimizer = torch.optim.Adagrad(parameters(encoder, head), lr=0.05)
    return (
        encoder,
        head,
        optimizer,
        Training(head, batches(), optimizer, encoder=encoder, callbacks=callbacks, **options),
    )


class NoSync(Callback):
    """A callback that forbids syncs after the first step and until the last."""

    def __init__(self, last):
        self.last, self.watched = last, no_sync()

    def on_step(self, training):
        if training.progress.step == 1:
            self.watched.__enter__()
        if training.progress.step == self.last:
            self.watched.__exit__(None, None, None)


def test_no_step_waits_for_the_device():
    *_, training = setting([NoSync(12)], epochs=2)
    assert training.run().progress.step == 16


def test_resumed_is_uninterrupted():
    options = {"epochs": 2, "probe_every": 5, "held_out": HeldOut(batches(2), every=3)}
    whole, left, resumed = setting(**options), setting([Recorder(interrupt_after=7)], **options), setting(**options)
    for one in (whole, left):
        # `model` seeds, but each run starts from the global RNG state that the last one left.
        torch.manual_seed(3)
        one[-1].run()
    for part, source in zip(resumed, left, strict=True):
        part.load_state_dict(source.state_dict())
    history = resumed[-1].run()
    assert history.best_loss is not None
    assert torch.allclose(whole[1].weight, resumed[1].weight, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_is_raised_at_the_next_record():
    broken = [(inputs * float("nan"), target) for inputs, target in batches()]
    encoder, head, optimizer, _ = setting(steps=1)
    training = Training(head, broken, optimizer, encoder=encoder, steps=8, report_every=4)
    with pytest.raises(ValueError, match="The loss must be finite, got nan by step 4"):
        training.run()
