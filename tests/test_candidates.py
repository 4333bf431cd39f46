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


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("excluded", [0, 1, 2, 3, 16, 17, 40])
@pytest.mark.parametrize("groups", [1, 3, 7])
def test_slots_that_hold_an_excluded_class_are_found(groups, excluded, ordered):
    generator = torch.Generator().manual_seed(excluded)
    batch, order = 7, torch.arange(7).flip(0) if ordered else None
    ids = torch.randint(0, 20, (groups, 9), generator=generator)
    shared = Block(ids, torch.zeros(groups, 9, dtype=torch.float64), order)
    candidates = Candidates((shared,), torch.randint(-1, 20, (batch, excluded), generator=generator), None, 20)
    expected = [
        [slot in set(own) for slot in row]
        for row, own in zip(shared.spread(ids, batch).tolist(), candidates.excluded.tolist(), strict=True)
    ]
    assert candidates.block_hits(shared).tolist() == expected
    assert candidates.hits(shared.spread(ids, batch)).tolist() == expected
    assert candidates.empty().tolist() == expected


def test_included_classes_follow_the_blocks_and_are_not_excluded():
    shared = Block(torch.tensor([[4, 5, 6]]), torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64))
    included = torch.tensor([[4, 9], [-1, 6]])
    candidates = Candidates((shared,), torch.tensor([[4, 9], [-1, 6]]), None, 10, included)
    assert candidates.ids().tolist() == [[4, 5, 6, 4, 9], [4, 5, 6, 0, 6]]
    assert candidates.log_kappa().tolist() == [[0, -math.inf, 1, 0, 0], [0, -math.inf, 1, -math.inf, 0]]
    assert candidates.empty().tolist() == [[True, True, False, False, False], [False, True, True, True, False]]
    # An empty slot can hold the target, so that scoring reads no further row.
    _, own = candidates.parts(empty=torch.tensor([7, 8]))
    assert own.ids.tolist() == [[4, 9], [8, 6]]
