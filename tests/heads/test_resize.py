"""Classes are added to heads and removed from them during training."""

import pytest
import torch
from torch import nn

from manyclass import ClassCounts, ClassHead
from manyclass.samplers import Importance
from tests.heads.test_linear import C, D, assert_close, data, make_head


def trained_head(optimizer_class, **options):
    counts = ClassCounts(torch.ones(C))
    head = make_head(sampler=Importance(counts, 8))
    optimizer = optimizer_class(head.parameters(), **options)
    hidden, target = data()
    for _ in range(3):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
    return head, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.Adam, {"lr": 0.1}),
    ],
)
def test_resize_adds_and_removes_classes_in_head_sampler_and_optimiser(optimizer_class, options):
    head, optimizer = trained_head(optimizer_class, **options)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    parameter = head.weight
    state = {name: value.clone() for name, value in optimizer.state[head.weight].items() if value.dim()}
    head.resize(C + 4, optimizer=optimizer)
    assert head.num_classes == head.sampler.num_classes == C + 4
    assert head.weight is parameter
    assert_close(head.weight.detach()[:C], weight)
    assert (head.bias.detach()[C:] == bias.min()).all()
    for name, value in state.items():
        assert_close(optimizer.state[head.weight][name][:C], value)
        assert (optimizer.state[head.weight][name][C:] == 0).all()
    hidden, target = data()
    target[0] = C + 3
    for _ in range(2):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
    head.resize(10, optimizer=optimizer)
    assert head.weight.shape == (10, D)
    optimizer.zero_grad()
    head(hidden, target % 10).backward()
    optimizer.step()
    assert head.topk(hidden, 10).ids.max() == 9


def test_an_optimiser_with_resize_rows_resizes_its_state_itself():
    class Recorder(torch.optim.SGD):
        def resize_rows(self, parameter, old_rows):
            resized.append((parameter, old_rows, len(parameter)))

    resized = []
    head, optimizer = trained_head(Recorder, lr=0.1, momentum=0.9)
    head.resize(C + 4, optimizer=optimizer)
    assert [(p is q, *rows) for (p, *rows), q in zip(resized, head.parameters(recurse=False), strict=True)] == [
        (True, C, C + 4),
        (True, C, C + 4),
    ]
    assert len(optimizer.state[head.weight]["momentum_buffer"]) == C


def test_resize_needs_a_sampler_of_class_counts_or_a_new_sampler():
    head = make_head(sampler=Importance(torch.ones(C), 5))
    with pytest.raises(ValueError, match="`sampler` must be built from ClassCounts to be resized to 30 classes"):
        head.resize(30)
    assert head.num_classes == C
    head.resize(30, sampler=Importance(torch.ones(30), 5))
    assert head.num_classes == 30


def test_resize_resizes_a_tied_embedding():
    embedding = nn.Embedding(C, D)
    head = ClassHead.tied(embedding, counts=torch.ones(C))
    head.resize(C + 2)
    assert embedding.num_embeddings == C + 2
    assert embedding(torch.tensor([C + 1])).shape == (1, D)
