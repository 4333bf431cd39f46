"""The training loop."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from manyclass import ClassHead, HierarchicalHead, ScorerHead
from manyclass.optim import RowAdagrad
from manyclass.samplers import Exhaustive, Importance
from manyclass.training import Callback, DivergedError, HeldOut, Training, evaluate
from tests.training.problems import B, C, D, Recorder, assert_same, batches, model, parameters, trained


def test_training_improves_the_held_out_likelihood():
    held_out = batches(seed=1)
    encoder, head = model()
    start = evaluate(head, held_out, encoder=encoder).loss
    encoder, head, history = trained(batches(30), epochs=6, held_out=HeldOut(held_out), lr=0.2)
    losses = [record.held_out_loss for record in history.records if record.held_out_loss is not None]
    assert len(losses) == 6
    assert losses[-1] < losses[0] < start - 0.3
    assert losses[-1] == evaluate(head, held_out, encoder=encoder).loss
    assert history.best_loss == min(losses)
    assert history.progress.examples == 6 * 30 * B


def test_a_training_equals_a_plain_loop():
    encoder, head = model()
    optimizer = torch.optim.Adagrad(parameters(encoder, head), lr=0.05)
    draws = torch.Generator().manual_seed(3)
    for inputs, target in batches() * 2:
        optimizer.zero_grad()
        head(encoder(inputs), target, generator=draws).backward()
        optimizer.step()
    assert_same((encoder, head), trained(epochs=2, seed=3)[:2])


def test_the_same_seed_gives_the_same_run():
    first, again, other = (trained(epochs=2, seed=seed, held_out=HeldOut(batches(2))) for seed in (1, 1, 2))
    assert_same(first[:2], again[:2])
    assert [(r.step, r.loss, r.held_out_loss) for r in first[2].records] == [
        (r.step, r.loss, r.held_out_loss) for r in again[2].records
    ]
    assert not torch.equal(first[1].weight, other[1].weight)


def test_a_probe_changes_nothing_and_measures_the_error():
    plain, probed = trained(epochs=2, probe_every=0), trained(epochs=2, probe_every=3)
    assert_same(plain[:2], probed[:2])
    found = {record.step: record.rmse_log_z for record in probed[2].records if record.rmse_log_z is not None}
    assert list(found) == [3, 6, 9, 12, 15]
    assert all(0 < value < 1 for value in found.values())


def test_a_probe_of_sequences_leaves_ignored_targets_out():
    hidden, target = torch.randn(2, 3, D), torch.tensor([[1, -100, 2], [-100, 3, 4]])
    for given, found in ((target, [True]), (torch.full((2, 3), -100), [False])):
        _, head = model()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        records = Training(head, [(hidden, given)], optimizer, steps=1, probe_every=1).run().records
        assert [record.rmse_log_z is not None for record in records] == found


def test_a_training_stops_at_the_first_limit():
    for limits, stopped, step in [
        ({"epochs": 2}, "epochs", 16),
        ({"steps": 11}, "steps", 11),
        ({"steps": 11, "epochs": 1}, "epochs", 8),
        ({"steps": 3, "epochs": 1}, "steps", 3),
        ({"seconds": 1e-9}, "seconds", 1),
    ]:
        history = trained(**limits)[2]
        assert (history.stopped, history.progress.step) == (stopped, step)
        assert history.records[-1].step == step
        assert history.best_step is history.best_loss is None


def test_evaluations_come_when_they_are_due():
    def steps(**options):
        records = trained(steps=20, held_out=HeldOut(batches(1), **options))[2].records
        return [record.step for record in records if record.held_out_loss is not None]

    assert steps() == [8, 16, 20]
    assert steps(every=6) == [6, 12, 18, 20]
    assert steps(every=10) == [10, 20]


def test_a_training_stops_when_patience_ends_and_restores_the_best():
    held_out = batches(seed=1)
    encoder, head, history = trained(
        batches(2), lr=0.5, epochs=500, held_out=HeldOut(held_out, every=2, patience=3, restore_best=True)
    )
    losses = [record.held_out_loss for record in history.records if record.held_out_loss is not None]
    assert history.stopped == "patience"
    assert losses.index(min(losses)) == len(losses) - 4
    assert history.best_loss == min(losses)
    assert history.best_step == history.records[-1].step - 6
    assert evaluate(head, held_out, encoder=encoder).loss == min(losses) < losses[-1]


def test_the_best_of_tied_tables_is_kept_once():
    embedding = torch.nn.Embedding(C, D)
    head = ClassHead.tied(embedding, sampler=Exhaustive(C))
    ids = [(target, target) for _, target in batches()]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    held_out = HeldOut(ids, restore_best=True)
    training = Training(head, ids, optimizer, encoder=embedding, epochs=1, held_out=held_out)
    training.run()
    kept = training.state_dict()["best"]["tensors"]
    assert kept["0.weight"] is kept["1.weight"]
    assert kept["0.weight"] is not embedding.weight


def test_callbacks_are_called_in_order():
    log = []
    callbacks = [Recorder(log=log, name="a "), Recorder(log=log, name="b ")]
    trained(batches(2), epochs=1, report_every=2, held_out=HeldOut(batches(1)), callbacks=callbacks)
    assert [line for line in log if line.startswith("a")] == [
        "a step 1",
        "a record 2",
        "a step 2",
        "a record 2",
        "a end",
    ]
    assert [line.removeprefix("b ") for line in log[1::2]] == [line.removeprefix("a ") for line in log[::2]]


def test_a_callback_may_leave_hooks_out():
    class Ends(Callback):
        def on_end(self, training, history):
            self.stopped = history.stopped

    ends = Ends()
    trained(steps=1, callbacks=[ends])
    assert ends.stopped == "steps"


def test_the_loss_is_smoothed():
    seen = []

    class Head(ClassHead):
        def forward(self, *inputs, **options):
            loss = super().forward(*inputs, **options)
            seen.append(loss.item())
            return loss

    head = Head(D, C)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    history = Training(head, batches(), optimizer, steps=80, report_every=10, probe_every=0).run()
    assert history.records[3].loss == pytest.approx(math.fsum(seen[:40]) / 40)
    expected = math.fsum(seen[:50]) / 50
    for loss in seen[50:]:
        expected = 0.98 * expected + 0.02 * loss
    assert history.records[-1].loss == pytest.approx(expected)


def test_several_optimisers_and_schedulers():
    encoder, head = model(sparse=True)
    rows = RowAdagrad(head.parameters(), lr=0.1)
    dense = torch.optim.Adam(encoder.parameters(), lr=0.01)
    schedulers = [LambdaLR(rows, lambda step: 1 / (1 + step)), LambdaLR(dense, lambda step: 0.5**step)]
    before = [parameter.clone() for parameter in parameters(encoder, head)]
    Training(head, batches(), [rows, dense], encoder=encoder, schedulers=schedulers, steps=4, clip=1.0).run()
    assert rows.param_groups[0]["lr"] == pytest.approx(0.1 / 5)
    assert dense.param_groups[0]["lr"] == pytest.approx(0.01 / 16)
    assert all(not torch.equal(*pair) for pair in zip(before, parameters(encoder, head), strict=True))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_clipped(sparse):
    encoder, head = model(sparse=sparse)
    before = [parameter.clone() for parameter in parameters(encoder, head)]
    optimizer = torch.optim.SGD(parameters(encoder, head), lr=1.0)
    Training(head, batches(), optimizer, encoder=encoder, steps=1, clip=1e-3).run()
    moved = [(a - b).flatten() for a, b in zip(before, parameters(encoder, head), strict=True)]
    assert torch.cat(moved).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_clipping_may_be_a_function():
    def clip(given):
        lengths.append(len(given))
        for parameter in given:
            parameter.grad.zero_()

    lengths = []
    encoder, head = model()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0)
    Training(head, batches(), optimizer, encoder=encoder, steps=2, clip=clip).run()
    assert lengths == [4, 4]
    assert_same([encoder], [model()[0]])


def test_optimisers_catch_up_before_parameters_are_read():
    class Lazy(torch.optim.SGD):
        caught_up = 0

        def catch_up(self):
            self.caught_up += 1

    encoder, head = model()
    optimizer = Lazy(parameters(encoder, head), lr=0.1)
    Training(head, batches(), optimizer, encoder=encoder, epochs=1, held_out=HeldOut(batches(1), every=4)).run()
    assert optimizer.caught_up == 3


def test_extras_reach_the_head():
    (hidden, target), *_ = batches(1)
    weight = torch.zeros(B)
    weight[0] = 1.0
    alone, weighted = ClassHead(D, C), ClassHead(D, C)
    weighted.load_state_dict(alone.state_dict())
    for head, batch in [(alone, (hidden[:1], target[:1])), (weighted, (hidden, target, {"weight": B * weight}))]:
        Training(head, [batch], torch.optim.SGD(head.parameters(), lr=0.1), epochs=1).run()
    assert torch.allclose(alone.weight, weighted.weight)


@pytest.mark.parametrize("size", [1, 4])
def test_a_weight_counts_the_same_in_every_batch(size):
    """Small SGD steps on examples in one batch, or in a batch each, have the same sum."""
    hidden, target = batches(1)[0]
    hidden, target = hidden[:4], target[:4]
    weight = torch.tensor([8.0, 0.5, 0.0, 1.0])
    moved = []
    for worth in (weight, torch.ones(4)):
        head = ClassHead(D, C)
        with torch.no_grad():
            head.weight.zero_()
        for i in range(0, 4, size):
            part = slice(i, i + size)
            batch = (hidden[part], target[part], {"weight": worth[part]})
            Training(head, [batch], torch.optim.SGD(head.parameters(), lr=1e-3 * size), epochs=1).run()
        moved.append(head.weight.detach().clone())
    head = ClassHead(D, C)
    with torch.no_grad():
        head.weight.zero_()
    (weight * head.exact_loss(hidden, target, reduction="none")).sum().backward()
    assert torch.allclose(moved[0], -1e-3 * head.weight.grad, rtol=1e-2, atol=1e-6)
    assert not torch.allclose(moved[1], -1e-3 * head.weight.grad, rtol=1e-2, atol=1e-6)


def test_other_heads_train_too():
    items = torch.nn.Embedding(C, D)

    class Dot(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.items = items

        def forward(self, hidden, ids):
            return hidden @ self.items(ids).transpose(1, 2)

    for head, every in [
        (ScorerHead(Dot(), Importance(torch.ones(C), 9)), 4),
        (HierarchicalHead(D, C), None),
    ]:
        optimizer = torch.optim.Adagrad(head.parameters(), lr=0.2)
        held_out = HeldOut(batches())
        history = Training(head, batches(), optimizer, epochs=3, held_out=held_out, probe_every=every).run()
        losses = [record.held_out_loss for record in history.records if record.held_out_loss is not None]
        assert losses[-1] < losses[0]
        assert [record.rmse_log_z is not None for record in history.records].count(True) == (6 if every else 0)


def test_a_loss_that_is_not_finite_is_an_error():
    class Broken(ClassHead):
        def forward(self, *inputs, **options):
            return super().forward(*inputs, **options) * float("inf")

    recorder, head = Recorder(), Broken(D, C)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="The loss must be finite, got inf by step 1"):
        Training(head, batches(), optimizer, steps=3, callbacks=[recorder]).run()
    assert recorder.history.stopped == "failed"


def test_an_error_says_after_which_step():
    source = batches(3)
    source[2] = (source[2][0], torch.full((B,), C))
    with pytest.raises(ValueError, match="`target` must lie in") as caught:
        trained(source, epochs=1)
    assert caught.value.__notes__ == ["Training ended after step 2."]


def test_a_training_ends_when_an_iterator_is_exhausted():
    assert trained(iter(batches()), epochs=1)[2].stopped == "epochs"
    history = trained(iter(batches()), steps=20)[2]
    assert (history.stopped, history.progress.step) == ("batches", 8)


def test_an_interrupted_iterator_continues_at_its_position():
    encoder, head = model()
    optimizer = torch.optim.Adagrad(parameters(encoder, head), lr=0.05)
    recorder = Recorder(interrupt_after=3)
    training = Training(head, iter(batches()), optimizer, encoder=encoder, epochs=1, callbacks=[recorder])
    assert training.run().stopped == "interrupted"
    assert training.run().progress.step == 8
    assert_same((encoder, head), trained(epochs=1)[:2])


SGD = torch.optim.SGD
REFUSED = {
    "no limit": ({}, ValueError, "`epochs`, `steps` or `seconds` must be given, got None for each"),
    "no epochs": ({"epochs": 0}, ValueError, "`epochs` must be at least 1, got 0"),
    "steps not whole": ({"steps": 1.5}, TypeError, "`steps` must be an int, got 1.5"),
    "no seconds": ({"seconds": 0}, ValueError, "`seconds` must be finite and above 0, got 0"),
    "report": ({"steps": 1, "report_every": 0}, ValueError, "`report_every` must be at least 1, got 0"),
    "probes": ({"steps": 1, "probe_every": -1}, ValueError, "`probe_every` must be at least 0, got -1"),
    "clip": ({"steps": 1, "clip": 0.0}, ValueError, "`clip` must be finite and above 0, got 0.0"),
    "seed": ({"steps": 1, "seed": -1}, ValueError, "`seed` must be at least 0, got -1"),
    "an iterator": (
        {"batches": iter([]), "epochs": 2},
        TypeError,
        "`batches` must be iterable more than once for 2 epochs, got a list_iterator",
    ),
    "no batches": ({"batches": [], "steps": 1}, ValueError, "`batches` must hold a batch, got none in epoch 0"),
    "no pair": (
        {"batches": [torch.zeros(2)], "steps": 1},
        TypeError,
        r"`batches` must yield \(inputs, target\) or \(inputs, target, extras\), got Tensor",
    ),
    "four parts": ({"batches": [(1, 2, 3, 4)], "steps": 1}, TypeError, "got 4 parts"),
    "target": ({"batches": [(1, 2)], "steps": 1}, TypeError, "`target` must be a Tensor, got int"),
    "extras": (
        {"batches": [(torch.zeros(1, D), torch.tensor([1]), {"wait": torch.ones(1)})], "steps": 1},
        ValueError,
        "`extras` must be one of 'weight', 'include', 'exclude', 'log_z', got 'wait'",
    ),
    "extras no mapping": (
        {"batches": [(torch.zeros(1, D), torch.tensor([1]), torch.ones(1))], "steps": 1},
        TypeError,
        "`extras` must be a mapping, got Tensor",
    ),
    "no optimiser": ({"steps": 1, "optimizers": []}, ValueError, "`optimizers` must hold an optimiser, got none"),
    "probe without draws": (
        {"steps": 1, "head": HierarchicalHead(D, C), "probe_every": 5},
        ValueError,
        "`probe_every` must be None or 0 for HierarchicalHead, which has no sampler, got 5",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_clear_words(options, error, message):
    options = {"head": ClassHead(D, C), "batches": batches(1), **options}
    options.setdefault("optimizers", SGD(options["head"].parameters(), lr=0.1))
    with pytest.raises(error, match=message):
        Training(**options).run()


def test_optimisers_must_fit():
    head = ClassHead(D, C)
    one, two = SGD(head.parameters(), lr=0.1), SGD([head.weight], lr=0.1)
    with pytest.raises(ValueError, match="`optimizers` must not share a parameter"):
        Training(head, batches(), [one, two], steps=1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(one)
    with pytest.raises(TypeError, match="`schedulers` must need nothing but the number of steps"):
        Training(head, batches(), one, schedulers=plateau, steps=1)


def test_patience_is_at_least_1():
    with pytest.raises(ValueError, match="`patience` must be at least 1, got 0"):
        HeldOut([], patience=0)


def test_a_loss_that_is_not_finite_raises_diverged_error():
    with pytest.raises(DivergedError):
        trained(lr=1e30, epochs=5)
    assert issubclass(DivergedError, ValueError)
