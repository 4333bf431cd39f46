"""Gradient checkpointing: the recomputation draws the same candidates, and the sampler learns once a step."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from manyclass import ClassHead
from manyclass.samplers import Budget, Clustered, Learned, Systematic, Tailored
from tests.tables import SAMPLERS

C, D, B, STEPS = 60, 5, 8, 7
# Built again every few steps, so that a new table is used between a forward pass and its recomputation.
REBUILT = {
    "clustered, rebuilt": lambda w, k, g: Clustered(w, k, group_size=4, every=4),
    "tailored, rebuilt": lambda w, k, g: Tailored(w, k, rank=3, every=4),
    "learned, rebuilt": lambda w, k, g: Learned(w, k, every=4),
    "budget, rebuilt": lambda w, k, g: Budget(Learned(w, k, every=4), 0.01, every=1),
    "systematic, rebuilt": lambda w, k, g: Systematic(w, k, order="cluster"),
}
EVERY = {**SAMPLERS, **REBUILT}
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "reentrant"])


class Recorder:
    """A record of the calls that a head makes of its sampler, and of the candidates it gets."""

    def __init__(self, head, monkeypatch):
        self.calls, self.drawn = [], []
        for name in ("advance", "draw", "observe"):
            monkeypatch.setattr(head.sampler, name, self.record(name, getattr(head.sampler, name)), raising=False)

    def record(self, name, call):
        def recorded(*args, **options):
            result = call(*args, **options)
            # Budget draws further candidates to measure its error.
            if name != "draw" or options["generator"] is None:
                self.calls.append(name)
                self.drawn += [result] * (name == "draw")
            return result

        return recorded


def make(name):
    torch.manual_seed(0)
    return ClassHead(D, C, sampler=EVERY[name](torch.rand(C) + 0.1, 9, None))


def train(head, loss_of, then=lambda: None):
    """Do a few steps, and return the losses."""
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        hidden = torch.randn(B, D, generator=generator, requires_grad=True)
        target = torch.randint(0, C, (B,), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(hidden, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        then()
    return losses


@REENTRANT
@pytest.mark.parametrize("name", EVERY)
def test_a_step_draws_the_same_candidates_twice_and_learns_once(name, reentrant, monkeypatch):
    head = make(name)
    seen = Recorder(head, monkeypatch)

    def check():
        forward, again = seen.drawn
        assert torch.equal(forward.ids(), again.ids())
        assert torch.equal(forward.log_kappa(), again.log_kappa())
        assert seen.calls.count("advance") == 1
        assert seen.calls.count("observe") == head.sampler.learns
        seen.drawn.clear()
        seen.calls.clear()

    train(head, lambda hidden, target: checkpoint(head, hidden, target, use_reentrant=reentrant), check)


@pytest.mark.parametrize("name", EVERY)
def test_a_checkpoint_does_not_change_the_training(name):
    head, twin = make(name), make(name)
    losses = []
    for model, run in ((head, head), (twin, lambda *batch: checkpoint(twin, *batch, use_reentrant=False))):
        torch.manual_seed(1)
        losses.append(train(model, run))
    assert losses[0] == losses[1]
    assert torch.equal(head.weight, twin.weight)


@REENTRANT
@pytest.mark.parametrize("outer", [False, True], ids=["in recomputed", "in reentrant"])
def test_a_head_in_nested_checkpoints_never_learns_twice(outer, reentrant, monkeypatch):
    head = ClassHead(D, C, sampler=Learned(torch.ones(C), 9))
    seen = Recorder(head, monkeypatch)

    def inner(*batch):
        return checkpoint(head, *batch, use_reentrant=reentrant).cos()

    train(head, lambda *batch: checkpoint(inner, *batch, use_reentrant=outer))
    # In a reentrant checkpoint the forward pass of another cannot be told from its recomputation.
    expected = 0 if outer and not reentrant else STEPS
    assert seen.calls.count("advance") == seen.calls.count("observe") == expected


@REENTRANT
@pytest.mark.parametrize("training", [True, False])
def test_a_generator_is_refused(training, reentrant):
    head, generator = make("learned").train(training), torch.Generator()

    def loss(hidden, target):
        return checkpoint(lambda x, y: head(x, y, generator=generator), hidden, target, use_reentrant=reentrant)

    with pytest.raises(
        ValueError, match=r"`generator` must be None inside torch.utils.checkpoint, .*torch.manual_seed"
    ):
        train(head, loss)


def test_a_generator_is_accepted_where_nothing_is_recomputed():
    head, generator = make("learned"), torch.Generator()
    with torch.autograd.graph.save_on_cpu():
        train(head, lambda *batch: head(*batch, generator=generator))
