"""Exact results computed in chunks of examples and of classes equal those of one large product."""

import pytest
import torch

from manyclass import ClassHead
from manyclass.heads import exact
from tests.inference.model import trained


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks so small that a few examples need several."""
    for name, value in (("MAX_SCORES", 1 << 10), ("MAX_EXAMPLES", 7), ("MIN_EXAMPLES", 4)):
        monkeypatch.setattr(exact, name, value)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_chunks_do_not_change_results(similarity, bias):
    head, hidden = trained(300, 8, k=30, bias=bias, similarity=similarity, rows=50, dtype=torch.float64)
    scores = head.scores(hidden, torch.arange(300)).detach()
    log_p = scores.log_softmax(1)
    exclude = log_p.topk(3, 1).indices
    found = head.topk(hidden, 5, exclude=exclude)
    log_prob, ids = log_p.scatter(1, exclude, -torch.inf).topk(5, 1)
    assert torch.equal(found.ids, ids)
    torch.testing.assert_close(found.log_prob, log_prob)
    with torch.no_grad():
        torch.testing.assert_close(head.log_z(hidden), scores.logsumexp(1))


@pytest.mark.parametrize("rows", [1, 100, 5000])
def test_the_memory_of_a_chunk_is_bounded(rows, monkeypatch):
    sizes = []
    chunks = ClassHead.score_chunks

    def recorded_chunks(head, size):
        for start, score in chunks(head, size):

            def recorded_score(hidden, score=score):
                scores = score(hidden)
                sizes.append((scores.numel(), scores.shape[1] * head.dim))
                return scores

            yield start, recorded_score

    monkeypatch.setattr(ClassHead, "score_chunks", recorded_chunks)
    monkeypatch.setattr(exact, "MAX_SCORES", 1 << 16)
    head = ClassHead(32, 4000)
    head.topk(torch.randn(rows, 32), 3)
    with torch.no_grad():
        head.log_z(torch.randn(rows, 32))
    scores, vectors = map(max, zip(*sizes, strict=True))
    assert scores <= 1 << 16
    # A cosine copies the vectors of a chunk to normalise them.
    assert vectors <= 32 * (1 << 16) // 256


def test_an_empty_batch_has_no_best_classes():
    head, hidden = trained(50, 4, k=5)
    assert head.topk(hidden[:0], 3).ids.shape == (0, 3)


def test_exclusions_of_another_batch_size_are_refused():
    head, hidden = trained(50, 4, k=5)
    with pytest.raises(ValueError, match=r"`exclude` must have shape \[2, E\], got \[3, 1\]"):
        head.topk(hidden[:2], 3, exclude=torch.zeros(3, 1, dtype=torch.int64))
