"""On a GPU no step syncs with the device, a training can be resumed, and replayed steps are those of a loop by hand."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from manyclass import ClassHead
from manyclass.errors import Notice
from manyclass.optim import RowAdagrad
from manyclass.samplers import (
    Automatic,
    Bernoulli,
    Costs,
    ErrorProbe,
    Exhaustive,
    Importance,
    Learned,
    Systematic,
    WithExplicit,
)
from manyclass.training import Callback, HeldOut, ReplayedStep, Training
from tests.test_gpu import no_sync
from tests.training.problems import Recorder, batches, model, parameters
from tests.training.test_replay import ByHand, Replayed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's compiler warns about precision and uses deprecated functions; torch 2.11 warns about sparse gradients.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch",
        "ignore:TensorFloat32:UserWarning",
        "ignore:Sparse invariant checks:UserWarning",
    ),
]


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
    *_, head, _, training = setting([NoSync(12)], epochs=2)
    # A probe reads the error that it measures.
    head.own_probe = ErrorProbe(every=1000)
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


def replayed_and_by_hand(sampler, *, schedules=True, **options):
    """Return a loop by hand and a replayed step of equal models on a GPU."""

    def make():
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()).cuda()
        head = ClassHead(32, len(COUNTS), counts=COUNTS, sampler=sampler(), sparse=True, impl="triton", **options)
        rows = RowAdagrad(head.cuda().parameters(), 0.1, impl="triton")
        return encoder, head, [rows, torch.optim.Adam(encoder.parameters(), 0.01, capturable=True)]

    found = []
    for kind in (ByHand, Replayed):
        *parts, optimizers = make()
        decays = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99) for optimizer in optimizers]
        trainer = kind(*parts, optimizers, clip=1.0, schedulers=decays if schedules else [])
        trainer.generator = torch.Generator("cuda").manual_seed(5)
        found.append(trainer)
    return found


COUNTS = (1e5 / torch.arange(1, 3001, dtype=torch.float64)).ceil()


def on_gpu(step, size=256):
    generator = torch.Generator().manual_seed(step)
    target = torch.multinomial(COUNTS.float(), size, replacement=True, generator=generator)
    return torch.randn(size, 32, generator=generator).cuda(), target.cuda()


@pytest.mark.parametrize(
    "name",
    ["systematic", "learned", "learned, by cluster", "importance", "bernoulli", "batch", "exhaustive", "default"],
)
def test_300_replayed_steps_are_those_of_a_loop_by_hand(name):
    costs = Costs(exact=10.0, shared=1.0, tailored=20.0, per_class=0.0)
    samplers = {
        "systematic": lambda: Systematic(COUNTS, 200),
        "learned": lambda: Learned(COUNTS, 200, every=20),
        "learned, by cluster": lambda: Learned(COUNTS, 200, every=30, order="cluster"),
        "importance": lambda: Importance(COUNTS, 200),
        "bernoulli": lambda: Bernoulli(COUNTS, 200),
        "batch": lambda: WithExplicit(Learned(COUNTS, 200), "batch"),
        "exhaustive": lambda: Exhaustive(len(COUNTS)),
        "default": lambda: Automatic(COUNTS, 0.05, least=100, every=7, costs=costs),
    }
    one, other = replayed_and_by_hand(samplers[name])
    kept = {}
    worst = 0.0
    for step in range(300):
        losses = []
        for trainer in (one, other):
            torch.manual_seed(step)
            # torch adds sparse gradients of all rows in a way that waits for the device.
            accumulates = 100 <= step < 150 and name != "exhaustive"
            items = [on_gpu(step), on_gpu(1000 + step)] if accumulates else [on_gpu(step)]
            losses.append(trainer(*items))
            parts = [trainer.encoder, trainer.head, *trainer.optimizers]
            if step == 160:
                kept[trainer] = [copy.deepcopy(part.state_dict()) for part in parts]
            if step == 200:
                for part, state in zip(parts, kept[trainer], strict=True):
                    part.load_state_dict(state)
            if step == 220 and hasattr(trainer.head.sampler, "set_k"):
                trainer.head.sampler.set_k(250)
            if step % 50 == 0:
                trainer.head.exact_loss(trainer.encoder(on_gpu(0)[0]), on_gpu(0)[1])
        worst = max(worst, abs(float(losses[0]) - float(losses[1])))
    print(f"{name}: replayed {other.step.replays}, losses differ by {worst:.2e} at most")
    assert other.step.replays > 200
    assert worst < 1e-3


def test_a_step_that_waits_for_the_device_runs_as_usual():
    _, other = replayed_and_by_hand(lambda: Systematic(COUNTS, 200))
    step = ReplayedStep(lambda item: other.loss(item) * float(item[0].sum() > -1e9), other.optimizers)
    step(on_gpu(0))
    step(on_gpu(1))
    with pytest.warns(Notice, match="waits for the device"):
        step(on_gpu(2))
    step(on_gpu(3))
    assert step.replays == 0


def test_a_recording_that_fails_changes_no_later_step():
    one, other = replayed_and_by_hand(lambda: Exhaustive(len(COUNTS)), schedules=False)
    losses = []
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        for step in range(12):
            for trainer in (one, other):
                torch.manual_seed(step)
                losses.append(float(trainer(on_gpu(step), on_gpu(1000 + step))))
    assert any("run as usual, not replayed" in str(notice.message) for notice in notices)
    assert other.step.replays == 0
    assert losses[::2] == pytest.approx(losses[1::2], abs=1e-4)


def test_compiled_parts_are_replayed():
    torch._dynamo.reset()
    _, other = replayed_and_by_hand(lambda: Learned(COUNTS, 200, every=20), schedules=False)
    encoder, head = torch.compile(other.encoder), torch.compile(other.head)
    # A compiled draw takes torch's global generator.
    step = ReplayedStep(lambda item: head(encoder(item[0]), item[1]), other.optimizers, modules=[encoder, head])
    losses = [float(step(on_gpu(i % 20))) for i in range(60)]
    assert step.replays > 30
    assert sum(losses[-10:]) < sum(losses[:10])


def test_bfloat16_rows_rounded_at_random_move_in_replays():
    head = ClassHead(32, len(COUNTS), sampler=Systematic(COUNTS, 200), sparse=True, impl="triton", bias=False)
    head = head.to("cuda", torch.bfloat16)
    optimizer = RowAdagrad(head.parameters(), 0.01, by_row=True, impl="triton", stochastic_rounding=True)
    step = ReplayedStep(lambda item: head(item[0].bfloat16(), item[1]), optimizer)
    tables = []
    for i in range(30):
        step(on_gpu(i % 3))
        tables.append(head.weight.detach().clone())
    assert step.replays > 20
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(tables))
