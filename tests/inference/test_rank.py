"""Ranks equal those of slow loops over all classes."""

import math

import pytest
import torch

from manyclass import ClassHead
from manyclass.inference import rank, ranks
from manyclass.samplers import Exhaustive
from tests.inference.model import trained


def slow(head, hidden, target, exclude=None):
    """Return 1 plus the number of better classes and half the number of equal ones, excluded classes left out."""
    scores = head.scores(hidden, torch.arange(head.num_classes)).tolist()
    found = []
    for i, own in enumerate(target.tolist()):
        left = set(range(head.num_classes)) - {own}
        left -= set() if exclude is None else set(exclude[i].tolist())
        better = sum(scores[i][c] > scores[i][own] for c in left)
        equal = sum(scores[i][c] == scores[i][own] for c in left)
        found.append(1 + better + equal / 2)
    return found


@pytest.fixture(params=["at once", "in chunks"])
def _chunks(request, monkeypatch):
    if request.param == "in chunks":
        monkeypatch.setattr(rank, "MAX_SCORES", 1 << 9)


def tied_head():
    """Return a head whose small integer weights give many classes equal scores."""
    generator = torch.Generator().manual_seed(0)
    head = ClassHead(3, 200, sampler=Exhaustive(200), bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.randint(-1, 2, (200, 3), generator=generator))
    return head, torch.randint(-2, 3, (30, 3), generator=generator).double(), generator


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("excluded", [0, 1, 40])
def test_ties_get_their_mean_rank_and_excluded_classes_do_not_count(excluded):
    head, hidden, generator = tied_head()
    target = torch.randint(200, (30,), generator=generator)
    exclude = torch.randint(-1, 200, (30, excluded), generator=generator) if excluded else None
    found = ranks(head, hidden, target, exclude=exclude)
    assert found.dtype == torch.float64
    assert found.tolist() == slow(head, hidden, target, exclude)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_a_trained_head_ranks_its_best_classes_in_order(similarity):
    head, hidden = trained(300, 8, k=30, similarity=similarity, rows=20, dtype=torch.float64)
    target = head.topk(hidden, 300).ids[torch.arange(20), torch.arange(20) * 7]
    assert ranks(head, hidden, target).tolist() == [1 + 7 * i for i in range(20)]


def test_a_target_is_ranked_even_where_it_is_excluded():
    head, hidden, _ = tied_head()
    target = torch.arange(30)
    assert torch.equal(ranks(head, hidden, target, exclude=target.unsqueeze(1)), ranks(head, hidden, target))


@pytest.mark.parametrize("nan_in", ["hidden", "target", "other classes"])
def test_nan_scores_give_the_worst_rank(nan_in):
    head, hidden, _ = tied_head()
    target = torch.zeros(30, dtype=torch.int64)
    with torch.no_grad():
        if nan_in == "hidden":
            hidden.fill_(math.nan)
        elif nan_in == "target":
            head.weight[0] = math.nan
        else:
            head.weight[1:] = math.nan
    assert (ranks(head, hidden, target) >= 200).all()


def test_ranks_have_the_shape_of_targets():
    head, hidden, _ = tied_head()
    target = torch.arange(30).reshape(2, 5, 3)
    exclude = torch.full((2, 5, 3, 2), -1)
    found = ranks(head, hidden.reshape(2, 5, 3, 3), target, exclude=exclude)
    assert torch.equal(found.reshape(-1), ranks(head, hidden, torch.arange(30)))
    assert ranks(head, hidden[:0], target.reshape(-1)[:0]).shape == (0,)


def test_a_target_outside_the_classes_is_refused():
    head, hidden, _ = tied_head()
    with pytest.raises(ValueError, match=r"`target` must lie in \[0, 200\), got 200 at position 1"):
        ranks(head, hidden[:2], torch.tensor([0, 200]))
