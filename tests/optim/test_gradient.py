"""Rows of gradients that are sparse with repeated rows, coalesced or dense."""

import pytest
import torch

from manyclass import _sparse_gradients
from manyclass.optim import clip_grad_norm_
from manyclass.optim._gradient import coalesced_gradient, coalesced_rows
from tests.optim.tables import OURS, parameters, same, set_gradients

IDS = torch.tensor([4, 1, 4, 4, 7])


@pytest.fixture
def asynchronous(monkeypatch):
    """Sum repeated rows as on a GPU, where counting them would synchronise."""
    monkeypatch.setattr(_sparse_gradients, "would_synchronise", lambda gradient: not gradient.is_coalesced())


def test_ids_are_distinct_and_rows_are_sums():
    for p in parameters():
        set_gradients([p], IDS, 0)
        ids, rows = coalesced_rows(p)
        assert ids.tolist() == [1, 4, 7]
        same([rows], [p.grad.to_dense()[ids]])


def test_a_coalesced_gradient_is_not_coalesced_again():
    for p in parameters():
        set_gradients([p], IDS, 0)
        p.grad = p.grad.coalesce()
        ids, rows = coalesced_rows(p)
        assert ids.data_ptr() == p.grad._indices().data_ptr()
        assert rows.data_ptr() == p.grad._values().data_ptr()


def test_a_dense_gradient_has_all_rows():
    weight, _ = parameters()
    weight.grad = torch.ones_like(weight)
    ids, rows = coalesced_rows(weight)
    assert ids is None
    assert rows.data_ptr() == weight.grad.data_ptr()


def test_many_small_rows_in_half_precision_are_summed_in_float32():
    (weight, _) = parameters(torch.bfloat16)
    ids = torch.zeros(1000, dtype=torch.int64)
    weight.grad = torch.sparse_coo_tensor(
        ids.unsqueeze(0), torch.ones(1000, 3, dtype=torch.bfloat16), weight.shape, check_invariants=False
    )
    _, rows = coalesced_rows(weight)
    assert rows.tolist() == [[1000.0] * 3]


@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS[:0]], ids=["repeats", "one", "none"])
def test_each_repeat_holds_the_sum_if_rows_cannot_be_counted(asynchronous, ids):
    for p in parameters():
        set_gradients([p], ids, 0)
        dense = p.grad.to_dense()
        out, rows = coalesced_rows(p)
        assert out.tolist() == sorted(ids.tolist())
        same([rows, coalesced_gradient(p).to_dense()], [dense[out], dense])
        nonzero = coalesced_gradient(p)._values()
        same([nonzero.norm()], [dense.norm()])


@pytest.mark.parametrize("name", OURS)
def test_every_optimiser_accepts_repeats_that_hold_their_sum(asynchronous, name):
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


@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS[:0]], ids=["repeats", "one", "none"])
@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_torchs_clipping_counts_no_rows_that_cannot_be_counted(asynchronous, monkeypatch, norm_type, ids):
    params, dense = parameters(), parameters()
    set_gradients(params, ids, 0)
    for p, q in zip(params, dense, strict=True):
        q.grad = p.grad.to_dense()
    monkeypatch.setattr(torch.Tensor, "coalesce", None)
    norms = [torch.nn.utils.clip_grad_norm_(each, 0.5, norm_type) for each in (params, dense)]
    for each in (params, dense):
        torch.nn.utils.clip_grad_value_(each, 0.1)
    same([norms[0], *(p.grad.to_dense() for p in params)], [norms[1], *(q.grad for q in dense)])
