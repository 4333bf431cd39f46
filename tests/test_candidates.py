"""Candidates and their Blocks group a batch, restore it, and mark empty slots."""

import math

import pytest
import torch

from manyclass import Block, Candidates
from manyclass.candidates import join, put_in_front


def block(groups, k, order=None):
    ids = torch.arange(groups * k).reshape(groups, k)
    return Block(ids, torch.zeros(groups, k, dtype=torch.float64), order)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("batch", [1, 2, 7, 10])
def test_a_batch_goes_into_groups_and_back(batch, groups, ordered):
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch)) if ordered else None
    shared = block(groups, 3, order)
    x = torch.randn(batch, 5, 2)
    grouped = shared.group(x)
    assert grouped.shape == (groups, -(-batch // groups), 5, 2)
    assert torch.equal(shared.ungroup(grouped, batch), x)
    # Every example gets the classes of its group.
    size = -(-batch // groups)
    places = order.tolist() if ordered else list(range(batch))
    seen = shared.spread(shared.ids, batch)
    for place, example in enumerate(places):
        assert torch.equal(seen[example], shared.ids[place // size])


def test_neighbouring_blocks_with_the_same_grouping_are_joined():
    a, b, c, d = block(1, 2), block(1, 3), block(4, 2), block(1, 1)
    joined = join(a, b, c, d)
    assert [tuple(x.ids.shape) for x in joined] == [(1, 5), (4, 2), (1, 1)]
    assert joined[0].ids.tolist() == [[0, 1, 0, 1, 2]]


@pytest.mark.parametrize("groups", [1, 3])
def test_explicit_classes_come_first(groups):
    explicit = torch.tensor([8, 9])
    blocks = put_in_front(explicit, block(groups, 2))
    candidates = Candidates(blocks, torch.empty(3, 0, dtype=torch.int64), None, 10)
    assert candidates.ids()[:, :2].tolist() == [[8, 9]] * 3
    assert candidates.log_kappa().tolist() == [[0.0] * 4] * 3
    assert put_in_front(explicit[:0], block(groups, 2))[0].ids.shape == (groups, 2)


def test_slots_are_empty_by_padding_and_by_exclusion():
    shared = Block(torch.tensor([[4, 5, 6]]), torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64))
    candidates = Candidates((shared,), torch.tensor([[4, -1], [-1, 6], [5, 9]]), None, 10)
    assert candidates.empty().tolist() == [[True, True, False], [False, True, True], [False, True, False]]
    assert candidates.log_kappa(torch.float32).dtype == torch.float32
