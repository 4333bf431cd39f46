"""The loss for sentence-transformers, against plain loops and against the library's losses."""

import itertools
import math

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim
from torch import nn

from manyclass.integrations.sentence_transformers import InBatchLoss
from manyclass.objectives import (
    BlackOut,
    HingeRanking,
    Likelihood,
    LogisticRanking,
    NegativeSampling,
    NoiseContrastive,
    PlainImportance,
    SubsetSoftmax,
)
from tests.integrations.sentence_model import (
    ANCHORS,
    COUNTS,
    NEGATIVES,
    POSITIVES,
    SCALE,
    SIMILARITIES,
    embeddings,
    gradients,
    inputs,
    loss_by_loops,
    tiny_model,
)

NO_MODEL = nn.Sequential(nn.Identity())  # for losses that are given embeddings
OBJECTIVES = [Likelihood(), SubsetSoftmax(), NegativeSampling(), LogisticRanking(), HingeRanking(), BlackOut()]


@pytest.fixture
def model():
    return tiny_model()


BATCHES = {
    "distinct": [[0], [1], [2], [3], [4]],
    "repeated": [[0], [1], [0], [0], [1]],
    "hard negatives": [[0, 5], [1, 6], [2, 0], [3, 1], [4, 5]],
    "several, also of the batch, repeated, the positive or left out": [
        [0, 1, 5],
        [1, 6, 6],
        [0, 0, 2],
        [2, -1, 1],
        [1, -1, -1],
    ],
    "one example": [[3]],
    "one example with negatives": [[3, 1, 4]],
}


@pytest.mark.parametrize("mini_batch_size", [None, 2, 5])
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_loss_and_gradients_are_those_of_the_formula(ids, similarity, mini_batch_size):
    scale = 1.0 if similarity != "cosine" else SCALE
    loss = InBatchLoss(NO_MODEL, COUNTS, scale=scale, similarity=similarity, mini_batch_size=mini_batch_size)
    columns = embeddings(len(ids), 1 + len(ids[0]))
    ours = loss.calculate_loss([list(column.split(2)) for column in columns], torch.tensor(ids))
    expected = loss_by_loops(columns, ids, COUNTS.tolist(), similarity, scale)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    if len(ids) > 1 or len(ids[0]) > 1:
        ours, expected = (torch.autograd.grad(value, columns) for value in (ours, expected))
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_gradients_are_those_of_finite_differences(ids):
    loss = InBatchLoss(NO_MODEL, COUNTS, scale=3.0)
    columns = embeddings(len(ids), 1 + len(ids[0]))
    assert torch.autograd.gradcheck(
        lambda *columns: loss.calculate_loss([[column] for column in columns], torch.tensor(ids)), columns
    )


def test_the_sum_over_other_positives_is_unbiased():
    # exp loss is Z̃ / exp s(x, c): its mean over all batches must be Z / exp s(x, c), here for the first example.
    counts = COUNTS[:4].double()
    frequency = (counts / counts.sum()).tolist()
    anchor, table = (x.detach() for x in embeddings(4, 2))
    loss = InBatchLoss(NO_MODEL, counts, scale=1.0)
    target, mean = 2, 0.0
    for others in itertools.product(range(4), repeat=3):
        # Copies of the anchor in place of the other anchors: only the first example's loss is read.
        ids = torch.tensor([target, *others])
        candidates = loss._candidates(ids.unsqueeze(1))
        losses = loss._losses(anchor[:1].expand(4, -1), table[ids], [], slice(0, 4), candidates)
        mean += math.prod(frequency[c] for c in others) * losses[0].exp().item()
    scores = cos_sim(anchor[:1], table)[0]
    assert mean == pytest.approx(((scores - scores[target]).exp().sum()).item(), rel=1e-12)


def test_other_copies_of_the_positive_are_no_negatives():
    columns = embeddings(4, 2)
    loss = InBatchLoss(NO_MODEL, COUNTS).calculate_loss([[column] for column in columns], torch.tensor([3, 3, 3, 3]))
    assert loss.item() == 0


def library_loss(loss, model, offsets):
    """Return a loss of the library with numbers added to its scores, [B, B (1 + N)] for N columns of negatives."""
    return loss(model, scale=SCALE, similarity_fct=lambda a, b: cos_sim(a, b) + offsets[: len(a)] / SCALE)


def test_without_kappa_and_repeated_positives_it_is_the_loss_of_the_library(model):
    model.double()
    ids = torch.arange(5)
    ours = InBatchLoss(model, COUNTS, objective=SubsetSoftmax())(inputs(model, ANCHORS, POSITIVES), ids)
    theirs = MultipleNegativesRankingLoss(model)(inputs(model, ANCHORS, POSITIVES), None)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("counts", [torch.ones(7), COUNTS], ids=["uniform", "others"])
def test_kappa_is_an_offset_of_the_negatives_in_the_loss_of_the_library(model, counts):
    # With uniform counts it is log C/(B - 1) for all, and above 0, because B distinct positives need C ≥ B classes.
    model.double()
    offsets = -(4 * counts[:5].double() / counts.sum()).log().expand(5, 5)
    offsets = offsets.masked_fill(torch.eye(5, dtype=torch.bool), 0.0)
    ours = InBatchLoss(model, counts)(inputs(model, ANCHORS, POSITIVES), torch.arange(5))
    theirs = library_loss(MultipleNegativesRankingLoss, model, offsets)(inputs(model, ANCHORS, POSITIVES), None)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs), rtol=1e-9, atol=1e-12)


def test_hard_negatives_are_those_of_the_library_without_the_ones_of_other_examples(model):
    model.double()
    same = torch.eye(5, dtype=torch.bool)
    of_positives = -(4 * COUNTS[:5].double() / COUNTS.sum()).log().expand(5, 5)
    of_negatives = torch.full((5, 5), -torch.inf, dtype=torch.float64)
    offsets = torch.cat([of_positives.masked_fill(same, 0.0), of_negatives.masked_fill(same, 0.0)], 1)
    columns = (ANCHORS, POSITIVES, NEGATIVES)
    ids = torch.stack([torch.arange(5), torch.tensor([5, 6, 5, 6, 5])], 1)
    ours = InBatchLoss(model, COUNTS)(inputs(model, *columns), ids)
    theirs = library_loss(MultipleNegativesRankingLoss, model, offsets)(inputs(model, *columns), None)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs), rtol=1e-9, atol=1e-12)


def test_with_gradient_caching_and_without_kappa_it_is_the_cached_loss_of_the_library(model):
    model.double()
    ours = InBatchLoss(model, COUNTS, objective=SubsetSoftmax(), mini_batch_size=2)
    theirs = CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    ours, theirs = (
        ours(inputs(model, ANCHORS, POSITIVES), torch.arange(5)),
        theirs(inputs(model, ANCHORS, POSITIVES), None),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("mini_batch_size", [1, 2, 5, 100])
def test_gradient_caching_changes_nothing(model, mini_batch_size, objective, dtype):
    model.to(dtype)
    columns = (ANCHORS, POSITIVES, NEGATIVES)
    ids = torch.tensor([[0, 1], [1, 5], [0, 0], [2, -1], [1, 6]])
    found = []
    for size in (None, mini_batch_size):
        loss = InBatchLoss(model, COUNTS, objective=objective, mini_batch_size=size)(inputs(model, *columns), ids)
        found.append((loss.detach(), gradients(model, loss)))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def test_a_batch_of_one_without_negatives_has_loss_and_gradient_0(model):
    for size in (None, 4):
        loss = InBatchLoss(model, COUNTS, mini_batch_size=size)(
            inputs(model, ANCHORS[:1], POSITIVES[:1]), torch.tensor([2])
        )
        assert loss.item() == 0
        assert all((gradient == 0).all() for gradient in gradients(model, loss))


def test_without_gradients_the_loss_is_the_same(model):
    for size in (None, 2):
        loss = InBatchLoss(model, COUNTS, mini_batch_size=size)
        expected = loss(inputs(model, ANCHORS, POSITIVES), torch.arange(5))
        with torch.no_grad():
            found = loss(inputs(model, ANCHORS, POSITIVES), torch.arange(5))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
        assert not found.requires_grad


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_scores_are_in_full_precision_under_autocast(model, mini_batch_size):
    loss = InBatchLoss(model, COUNTS, mini_batch_size=mini_batch_size)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(inputs(model, ANCHORS, POSITIVES), torch.arange(5))
        columns = [model(column)["sentence_embedding"].detach() for column in inputs(model, ANCHORS, POSITIVES)]
    expected = loss.calculate_loss([[column.double()] for column in columns], torch.arange(5))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients(model, found))


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_matryoshka_sums_the_losses_of_all_dimensions(model, mini_batch_size):
    model.double()
    loss = MatryoshkaLoss(model, InBatchLoss(model, COUNTS, mini_batch_size=mini_batch_size), [8, 4])
    found = loss(inputs(model, ANCHORS, POSITIVES), torch.arange(5))
    columns = [model(column)["sentence_embedding"] for column in inputs(model, ANCHORS, POSITIVES)]
    expected = sum(
        loss_by_loops([column[:, :dim] for column in columns], [[c] for c in range(5)], COUNTS.tolist())
        for dim in (8, 4)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"counts": [1.0]}, TypeError, "`counts` must be a Tensor, got list"),
        ({"counts": torch.tensor([1.0, -1.0])}, ValueError, "`counts` must be finite and not negative, got -1.0"),
        ({"scale": 0.0}, ValueError, "`scale` must be finite and above 0, got 0.0"),
        ({"similarity": "angle"}, ValueError, "`similarity` must be one of 'cosine', .* got 'angle'"),
        ({"mini_batch_size": 0}, ValueError, "`mini_batch_size` must be at least 1, got 0"),
        ({"mini_batch_size": 2.0}, TypeError, "`mini_batch_size` must be an int, got 2.0"),
        ({"objective": PlainImportance()}, ValueError, "`objective` must be one that sums the target explicitly"),
        ({"objective": NoiseContrastive()}, ValueError, "`objective` must be one that sums the target explicitly"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        InBatchLoss(NO_MODEL, **{"counts": COUNTS, **options})


@pytest.mark.parametrize("mini_batch_size", [None, 2])
@pytest.mark.parametrize(
    ("labels", "columns", "error", "message"),
    [
        (None, 2, ValueError, "`labels` must hold class ids, got None: the dataset needs a column 'label'"),
        ([0.0, 1.0, 2.0, 3.0, 4.0], 2, TypeError, "`labels` must hold integers, got torch.float32"),
        ([0, 1, 2, 3], 2, ValueError, r"`labels` must have shape \[5, 1\].*, got \[4, 1\]"),
        ([0, 1, 2, 3, 4], 3, ValueError, r"`labels` must have shape \[5, 2\], .*hard negatives, got \[5, 1\]"),
        ([[[0]]] * 5, 2, ValueError, r"`labels` must have shape \[5, 1\].*, got \[5, 1, 1\]"),
        ([0, 1, 7, 3, 4], 2, ValueError, r"`labels` must lie in \[0, 7\), got 7 at position \(2, 0\)"),
        ([0, 1, -1, 3, 4], 2, ValueError, r"`labels` must lie in \[0, 7\), got -1 at position \(2, 0\)"),
        ([[0, 7]] * 5, 3, ValueError, r"`labels` must lie in \[0, 7\) \(or be -1, a pad\), got 7 at position \(0, 1\)"),
        ([[-1, 1]] * 5, 3, ValueError, r"`labels` must lie in \[0, 7\), got -1 at position \(0, 0\)"),
        ([0, 1, 2, 3, 4], 1, ValueError, "`sentence_features` must hold anchors, positives .* got 1 column"),
    ],
)
def test_bad_batches_are_refused(model, labels, columns, error, message, mini_batch_size):
    texts = (ANCHORS, POSITIVES, NEGATIVES)[:columns]
    labels = None if labels is None else torch.tensor(labels)
    with pytest.raises(error, match=message):
        InBatchLoss(model, COUNTS, mini_batch_size=mini_batch_size)(inputs(model, *texts), labels)
