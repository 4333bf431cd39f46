"""Autocast does not change an index, what it finds, or estimates of log Z."""

import pytest
import torch

from manyclass.inference import Index, estimate_log_z, top
from tests.inference.model import trained

pytest.importorskip("faiss")

HALF_DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def built():
    head, hidden = trained()
    return head, hidden, Index.build(head, hidden)


@pytest.mark.parametrize("half", HALF_DTYPES)
def test_the_index_is_the_same(built, half):
    head, hidden, index = built
    with torch.autocast("cpu", dtype=half):
        again = Index.build(head, hidden)
    assert (again.report.probes, again.report.recall) == (index.report.probes, index.report.recall)
    mine, other = again.state(), index.state()
    assert mine.about["digest"] == other.about["digest"]
    assert all(torch.equal(mine.tensors[name], other.tensors[name]) for name in other.tensors)


@pytest.mark.parametrize("half", HALF_DTYPES)
@pytest.mark.parametrize("probabilities", ["exact", "estimated"])
def test_the_best_classes_and_their_probabilities_are_the_same(built, probabilities, half):
    head, hidden, index = built

    def found(rows):
        generator = torch.Generator().manual_seed(0)
        return top(head, rows, 7, index=index, probabilities=probabilities, generator=generator)

    expected, recall = found(hidden), index.recall(hidden)
    with torch.autocast("cpu", dtype=half):
        best = found(hidden)
        # The output of an encoder is in half precision there.
        rounded = found(hidden.to(half))
        assert index.recall(hidden) == recall
    assert torch.equal(best.ids, expected.ids)
    assert torch.equal(best.log_prob, expected.log_prob)
    assert torch.equal(rounded.log_prob, found(hidden.to(half).float()).log_prob)


@pytest.mark.parametrize("half", HALF_DTYPES)
def test_estimates_of_log_z_are_the_same(built, half):
    head, hidden, _ = built

    def estimate():
        return estimate_log_z(head, hidden, generator=torch.Generator().manual_seed(0))

    expected = estimate()
    with torch.autocast("cpu", dtype=half):
        found = estimate()
    assert torch.equal(found.log_z, expected.log_z)
    assert torch.equal(found.error, expected.error)
