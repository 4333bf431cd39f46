"""A step that is replayed has the losses and parameters of a loop by hand; recording is replaced by a call here."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn

from manyclass import ClassHead
from manyclass.errors import Notice
from manyclass.objectives import LogisticRanking
from manyclass.optim import RowAdagrad, RowAdam, RowSGD, clip_grad_norm_
from manyclass.samplers import Automatic, Budget, Costs, Learned, Systematic, Tailored, WithExplicit
from manyclass.training import ReplayedStep
from manyclass.training import replay as module
from tests.tables import SAMPLERS

C, D, B = 300, 8, 24
COUNTS = (1 / torch.arange(1, C + 1, dtype=torch.float64)).mul_(1000).ceil_()
IN_PYTHON = ("clustered", "tailored", "tailored, nearest explicit")


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """Let a replay call the work that a GPU would record."""

    def record(self, work, generators):
        self._number += 1
        return work

    monkeypatch.setattr(module._Graphs, "are_possible", lambda self, tensors: bool(tensors))
    monkeypatch.setattr(module._Graphs, "record", record)


def batch(step, size=B):
    generator = torch.Generator().manual_seed(step)
    target = torch.multinomial(COUNTS.float(), size, replacement=True, generator=generator)
    return torch.randn(size, D, generator=generator), target


def model(sampler=None, optimizer=RowAdagrad, **options):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.2), nn.Tanh())
    sampler = Learned(COUNTS, 40, every=20, order="cluster") if sampler is None else sampler
    head = ClassHead(D, C, counts=COUNTS, sampler=sampler, sparse=True, **options)
    return encoder, head, [optimizer(head.parameters(), 0.1), torch.optim.Adam(encoder.parameters(), 0.01)]


class ByHand:
    """A loop by hand."""

    def __init__(self, encoder, head, optimizers, *, clip=None, schedulers=()):
        self.encoder, self.head, self.optimizers = encoder, head, optimizers
        self.clip, self.schedulers = clip, schedulers
        self.generator = torch.Generator().manual_seed(5)

    def loss(self, item):
        return self.head(self.encoder(item[0]), item[1], generator=self.generator)

    def __call__(self, *items):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = []
        for item in items:
            losses.append(self.loss(item) / len(items))
            losses[-1].backward()
        if self.clip is not None:
            clip_grad_norm_([p for o in self.optimizers for g in o.param_groups for p in g["params"]], self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return sum(losses).detach()


class Replayed(ByHand):
    """The same by a replayed step."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.step = ReplayedStep(
            self.loss, self.optimizers, clip=self.clip, schedulers=self.schedulers, modules=[self.encoder, self.head]
        )

    def __call__(self, *items):
        return self.step(*items)


def both(make=model, *, schedules=False, clip=None):
    """Return a loop by hand and a replayed step of equal models."""
    found = []
    for kind in (ByHand, Replayed):
        parts = make()
        decay = (lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)) if schedules else None
        # On the CPU torch's Adam holds its learning rate as a number.
        found.append(kind(*parts, clip=clip, schedulers=[] if decay is None else [decay(parts[2][0])]))
    return found


def check_equal(one, other, steps, *, between=None, items=1):
    for step in range(steps):
        losses = []
        for trainer in (one, other):
            # Dropout takes torch's global generator.
            torch.manual_seed(step)
            losses.append(trainer(*(batch(step * items + i) for i in range(items))))
            if between is not None:
                between(trainer, step)
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for left, right in zip(one.head.parameters(), other.head.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
    for left, right in zip(one.encoder.parameters(), other.encoder.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [RowAdagrad, RowAdam, RowSGD])
def test_300_steps_with_schedules_clipping_and_rebuilds_are_those_of_a_loop_by_hand(optimizer):
    one, other = both(lambda: model(optimizer=optimizer), schedules=True, clip=1.0)
    check_equal(one, other, 300)
    assert other.step.replays > 200


def test_gradients_of_several_batches_are_accumulated():
    one, other = both(lambda: model(Learned(COUNTS, 40, every=30)))
    check_equal(one, other, 40, items=3)
    assert other.step.replays > 20


def test_rebuilt_tables_are_copied_into_the_storage_of_the_recorded_draw():
    one, other = both(lambda: model(Learned(COUNTS, 60, every=8)))
    combs, storages = [], []

    def watch(trainer, step):
        if trainer is other:
            combs.append(trainer.head.sampler.comb)
            storages.append(trainer.head.sampler._fixed)

    check_equal(one, other, 100, between=watch)
    assert len({id(comb) for comb in combs}) > 5
    assert len({len(comb.certain) for comb in combs}) > 1
    assert len({id(storage) for storage in storages if storage is not None}) == 1


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in IN_PYTHON])
@pytest.mark.parametrize("group_size", [None, 7])
def test_steps_with_every_sampler_are_replayed(name, group_size):
    one, other = both(lambda: model(SAMPLERS[name](COUNTS, 40, group_size)))
    check_equal(one, other, 40)
    assert other.step.replays > 20


@pytest.mark.parametrize("name", IN_PYTHON)
def test_steps_with_a_sampler_that_draws_in_python_run_as_usual(name):
    one, other = both(lambda: model(SAMPLERS[name](COUNTS, 40, None)))
    with pytest.warns(Notice, match="run as usual.*(Clustered|Tailored) draws in Python"):
        check_equal(one, other, 10)
    assert other.step.replays == 0


def test_the_default_decides_between_replays():
    costs = Costs(exact=10.0, shared=1.0, tailored=20.0, per_class=0.0)
    one, other = both(lambda: model(Automatic(COUNTS, 0.02, least=20, every=3, costs=costs)))
    check_equal(one, other, 120)
    assert one.head.sampler.decisions == other.head.sampler.decisions != []
    assert one.head.sampler.probe.state() == other.head.sampler.probe.state()
    assert other.step.replays > 20


def test_a_changed_k_is_recorded_again():
    def change(trainer, step):
        if step in (20, 40):
            trainer.head.sampler.set_k(step)

    one, other = both(lambda: model(Systematic(COUNTS, 30)))
    check_equal(one, other, 60, between=change)
    assert other.step.replays > 40


def test_a_budget_changes_its_k_between_replays():
    one, other = both(lambda: model(Budget(Systematic(COUNTS, 10), 0.05, every=2)))
    check_equal(one, other, 60)
    assert one.head.sampler.k == other.head.sampler.k != 10


def test_loaded_states_and_evaluations_are_followed():
    kept = {}

    def between(trainer, step):
        parts = [trainer.encoder, trainer.head, *trainer.optimizers]
        if step == 10:
            kept[trainer] = [copy.deepcopy(part.state_dict()) for part in parts]
        if step == 25:
            for part, state in zip(parts, kept[trainer], strict=True):
                part.load_state_dict(state)
        if step % 7 == 0:
            trainer.encoder.eval(), trainer.head.eval()
            with torch.no_grad():
                trainer.loss(batch(step)), trainer.head.exact_loss(trainer.encoder(batch(0)[0]), batch(0)[1])
            trainer.encoder.train(), trainer.head.train()

    one, other = both()
    check_equal(one, other, 60, between=between)
    assert other.step.replays > 30


def test_a_module_that_changes_its_mode_is_recorded_again():
    def between(trainer, step):
        trainer.encoder.train(step < 15)

    one, other = both()
    check_equal(one, other, 30, between=between)


def test_each_shape_has_its_own_recording_and_other_shapes_run_as_usual():
    one, other = both()
    for step, size in enumerate([5, 9] * 10 + [3, 4]):
        losses = []
        for trainer in (one, other):
            torch.manual_seed(step)
            losses.append(trainer(batch(step, size)))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert len([shape for shape in other.step._shapes.values() if shape.replay is not None]) == 2


def test_an_objective_without_z_is_replayed():
    one, other = both(lambda: model(Systematic(COUNTS, 30), objective=LogisticRanking()))
    check_equal(one, other, 20)
    assert other.step.replays > 10


def test_further_tensors_are_returned():
    encoder, head, optimizers = model(Systematic(COUNTS, 30))
    step = ReplayedStep(
        lambda item: (head(encoder(item["x"]), item["y"]), item["x"].mean(), item["y"].sum()), optimizers
    )
    for i in range(9):
        x, y = batch(i)
        _, mean, total = step({"x": x, "y": y})
        assert mean == x.mean()
        assert total == y.sum()
    assert step.replays > 3


def test_modules_are_found_in_the_function():
    encoder, head, optimizers = model()

    def with_parts(encoder, head, item):
        return head(encoder(item[0]), item[1])

    class Owner:
        def __init__(self):
            self.encoder, self.head = encoder, head

        def loss(self, item):
            return self.head(self.encoder(item[0]), item[1])

    for function in (lambda item: head(encoder(item[0]), item[1]), partial(with_parts, encoder, head), Owner().loss):
        step = ReplayedStep(function, optimizers)
        assert {encoder, head} <= set(step._modules)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: RowSGD(p, 0.1, momentum=0.9), "RowSGD with momentum or weight decay keeps the history"),
        (lambda p: torch.optim.SparseAdam(p, 0.1), "SparseAdam has no option `capturable`"),
    ],
    ids=["momentum", "sparse adam"],
)
def test_steps_with_an_optimiser_that_works_in_python_run_as_usual(make, reason):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=Systematic(COUNTS, 30), sparse=True)
    step = ReplayedStep(lambda item: head(*item), make(list(head.parameters())))
    with pytest.warns(Notice, match=re.escape(reason)):
        step(batch(0))
    step(batch(2))
    assert step.replays == 0


def test_a_step_without_a_batch_is_refused():
    encoder, head, optimizers = model()
    with pytest.raises(ValueError, match="`batches` must hold a batch, got none"):
        ReplayedStep(lambda item: head(encoder(item[0]), item[1]), optimizers)()


def test_the_copy_of_a_replayed_sampler_holds_no_storage():
    one, other = both()
    check_equal(one, other, 10)
    assert other.head.sampler._fixed is not None
    assert copy.deepcopy(other.head.sampler)._fixed is None


def test_explicit_classes_of_the_batch_are_replayed_with_a_learning_sampler():
    one, other = both(lambda: model(WithExplicit(Learned(COUNTS, 30, every=10), "batch")))
    check_equal(one, other, 50)
    assert other.step.replays > 30


def test_tailored_designs_of_the_default_run_as_usual():
    costs = Costs(exact=10.0, shared=5.0, tailored=1.0, per_class=0.0)
    one, other = both(lambda: model(Automatic(COUNTS, 0.02, least=20, every=2, costs=costs)))
    check_equal(one, other, 60)
    assert isinstance(other.head.sampler.live, Tailored)
