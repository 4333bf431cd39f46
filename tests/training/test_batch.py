"""Batches are moved to the head's device."""

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType

import torch

from manyclass.training import Batch
from manyclass.training.batch import moved


class Moves(UserDict):
    """A mapping with a method `to`, as a tokenizer's batch has."""

    def to(self, device):
        return Moves({key: value.to(device) for key, value in self.items()}, moved=device)


Pair = namedtuple("Pair", "a b")


def test_tensors_are_moved_wherever_they_are():
    x, device = torch.zeros(2), torch.device("meta")
    for value in ({"a": x}, OrderedDict(a=x), MappingProxyType({"a": x}), UserDict(a=x), Moves(a=x)):
        assert moved(value, device)["a"].device == device
    assert moved(Moves(a=x), device)["moved"] == device
    pair = moved(Pair(x, [x, 3]), device)
    assert isinstance(pair, Pair)
    assert pair.a.device == pair.b[0].device == device
    assert pair.b[1] == 3


def test_ignored_targets_are_no_examples():
    target = torch.tensor([[1, 2], [3, -100]])
    assert Batch.of((torch.zeros(2, 2, 4), target), torch.device("cpu")).examples == 3
