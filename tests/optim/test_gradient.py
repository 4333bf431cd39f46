"""Rows of a gradient that is sparse with repeats, coalesced or dense."""

import pytest
import torch

from manyclass.optim import _gradient, clip_grad_norm_
from manyclass.optim._gradient import summed, touched
from tests.optim.tables import OURS, parameters, same, set_gradients

IDS = torch.tensor([4, 1, 4, 4, 7])


@pytest.fixture
def unwaiting(monkeypatch):
    """Sums repeated rows as on a GPU, where their number is not known."""
    monkeypatch.setattr(_gradient, "_waits", lambda gradient: not gradient.is_coalesced())


def test_ids_are_distinct_and_rows_are_sums():
    for p in parameters():
        set_gradients([p], IDS, 0)
        ids, rows = touched(p)
        assert ids.tolist() == [1, 4, 7]
        same([rows], [p.grad.to_dense()[ids]])


def test_what_is_coalesced_is_not_coalesced_again():
    for p in parameters():
        set_gradients([p], IDS, 0)
        p.grad = p.grad.coalesce()
        ids, rows = touched(p)
        assert ids.data_ptr() == p.grad._indices().data_ptr()
        assert rows.data_ptr() == p.grad._values().data_ptr()


def test_a_dense_gradient_touches_all_rows():
    weight, _ = parameters()
    weight.grad = torch.ones_like(weight)
    ids, rows = touched(weight)
    assert ids is None
    assert rows.data_ptr() == weight.grad.data_ptr()


def test_many_small_rows_in_half_precision_are_summed_in_float32():
    (weight, _) = parameters(torch.bfloat16)
    ids = torch.zeros(1000, dtype=torch.int64)
    weight.grad = torch.sparse_coo_tensor(
        ids.unsqueeze(0), torch.ones(1000, 3, dtype=torch.bfloat16), weight.shape, check_invariants=False
    )
    _, rows = touched(weight)
    assert rows.tolist() == [[1000.0] * 3]


@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS[:0]], ids=["repeats", "one", "none"])
def test_where_rows_cannot_be_counted_each_repeat_holds_the_sum(unwaiting, ids):
    for p in parameters():
        set_gradients([p], ids, 0)
        dense = p.grad.to_dense()
        out, rows = touched(p)
        assert out.tolist() == sorted(ids.tolist())
        same([rows, summed(p).to_dense()], [dense[out], dense])
        nonzero = summed(p)._values()
        same([nonzero.norm()], [dense.norm()])


@pytest.mark.parametrize("name", OURS)
def test_every_optimiser_bears_repeats_that_hold_their_sum(unwaiting, name):
    params, theirs = parameters(), parameters()
    optimizer, other = OURS[name](params), OURS[name](theirs)
    for step in range(4):
        set_gradients(params, IDS, step)
        set_gradients(theirs, IDS, step)
        for q in theirs:
            q.grad = q.grad.coalesce()
        same([clip_grad_norm_(params, 0.5)], [clip_grad_norm_(theirs, 0.5)])
        optimizer.step()
        other.step()
    same(params, theirs)
