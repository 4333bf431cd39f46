"""Evaluation is the exact likelihood, and changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyclass import ClassHead, HierarchicalHead
from manyclass.training import HeldOut, Training, evaluate
from tests.training.problems import B, C, D, batches, model


def test_it_is_the_cross_entropy_over_all_classes():
    encoder, head = model()
    inputs, target = (torch.cat(part) for part in zip(*batches(), strict=True))
    expected = F.cross_entropy(head.to_linear()(encoder(inputs)), target).item()
    assert evaluate(head, batches(), encoder=encoder).loss == pytest.approx(expected, rel=1e-5)


def test_batches_of_different_sizes_weigh_by_their_examples():
    encoder, head = model()
    inputs, target = (torch.cat(part) for part in zip(*batches(), strict=True))
    uneven = list(zip(inputs.split(50), target.split(50), strict=True))
    once, parts = (evaluate(head, source, encoder=encoder).loss for source in ([(inputs, target)], uneven))
    assert parts == pytest.approx(once, rel=1e-6)


def test_weights_exclusions_and_ignored_targets_count():
    head = ClassHead(D, C)
    (hidden, target), *_ = batches(1)
    target = target.clone()
    target[3] = -100
    weight, exclude = torch.rand(B), torch.randint(0, C, (B, 2))
    expected = head.exact_loss(hidden, target, weight=weight, exclude=exclude).item()
    extras = {"weight": weight, "exclude": exclude}
    report = evaluate(head, [(hidden, target, extras)], metrics={"one": lambda hidden, batch: batch.target != -100})
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert report.metrics == {"one": pytest.approx(1.0)}


@pytest.mark.parametrize("make", [ClassHead, HierarchicalHead])
def test_batches_that_include_classes_are_trained_on_and_evaluated_exactly(make):
    torch.manual_seed(0)
    head = make(D, C)
    (hidden, target), *_ = batches(1)
    item = (hidden, target, {"include": torch.randint(-1, C, (B, 3))})
    assert evaluate(head, [item]) == evaluate(head, [(hidden, target)])
    before = head.weight.detach().clone()
    Training(head, [item], torch.optim.SGD(head.parameters(), lr=0.1), steps=3).run()
    assert not torch.equal(head.weight, before)


def test_metrics_are_means_over_examples():
    encoder, head = model()

    def accuracy(hidden, batch):
        return head.topk(hidden, 1).ids.squeeze(-1) == batch.target

    inputs, target = (torch.cat(part) for part in zip(*batches(), strict=True))
    right = (head.to_linear()(encoder(inputs)).argmax(1) == target).double().mean().item()
    assert evaluate(head, batches(), encoder=encoder, metrics={"accuracy": accuracy}).metrics == {
        "accuracy": pytest.approx(right)
    }


def test_modules_return_to_their_mode():
    encoder, head = model(dropout=0.9)
    encoder[1].eval()
    before = torch.get_rng_state()
    losses = {evaluate(head, batches(), encoder=encoder).loss for _ in range(2)}
    assert len(losses) == 1
    assert [part.training for part in encoder] == [True, False, True, True]
    assert head.training
    assert torch.equal(before, torch.get_rng_state())


def test_inputs_may_be_nested():
    class Encoder(nn.Module):
        def forward(self, inputs):
            return inputs["left"] + inputs["pair"][0]

    head = ClassHead(D, C)
    (hidden, target), *_ = batches(1)
    nested = {"left": hidden, "pair": (torch.zeros_like(hidden), "a note")}
    assert evaluate(head, [[nested, target]], encoder=Encoder()).loss == evaluate(head, [(hidden, target)]).loss


def test_a_head_without_a_sampler_is_its_own_exact_loss():
    head = HierarchicalHead(D, C)
    (hidden, target), *_ = batches(1)
    assert evaluate(head, [(hidden, target)]).loss == pytest.approx(head(hidden, target).item(), rel=1e-6)


def test_batches_without_an_example_are_refused():
    head = ClassHead(D, C)
    ignored = torch.full((B,), -100)
    for source in ([], [(torch.zeros(B, D), ignored)]):
        with pytest.raises(ValueError, match="`batches` must hold an example to evaluate on"):
            evaluate(head, source)
    with pytest.raises(
        TypeError, match="`batches` must be iterable more than once to evaluate on, got a list_iterator"
    ):
        HeldOut(iter(batches()))
    with pytest.raises(ValueError, match=r"`metrics\['mean'\]` must have shape \[16\], got \[\]"):
        evaluate(head, batches(1), metrics={"mean": lambda hidden, batch: hidden.mean()})
