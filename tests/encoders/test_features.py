import numpy as np
import pytest
import torch
from scipy.sparse import csr_array, random_array
from torch import nn

from manyclass.data.rows import as_inputs
from manyclass.encoders import FeatureEncoder
from manyclass.optim import RowAdagrad, RowAdam, RowSGD


def sparse_rows(n=6, features=40):
    matrix = random_array((n, features), density=0.2, format="csr", rng=np.random.default_rng(0))
    return csr_array(matrix)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("rank", "hidden_layers", "dim"), [(None, (), 40), (5, (), 5), (None, (7,), 7), (5, (7, 3), 3)]
)
def test_dense_and_sparse_rows_have_the_same_vectors(sparse, rank, hidden_layers, dim):
    encoder = FeatureEncoder(40, sparse=sparse, rank=rank, hidden_layers=hidden_layers)
    rows = sparse_rows()
    from_sparse, from_dense = encoder(as_inputs(rows)), encoder(as_inputs(rows.toarray()))
    assert encoder.dim == dim
    assert from_sparse.shape == (6, dim)
    torch.testing.assert_close(from_sparse, from_dense)


def test_without_layers_the_vector_is_the_row():
    rows = sparse_rows()
    matrix = torch.from_numpy(rows.toarray()).float()
    assert torch.equal(FeatureEncoder(40, sparse=False)(matrix), matrix)
    assert torch.equal(FeatureEncoder(40, sparse=True)(as_inputs(rows)), matrix)


def test_many_sparse_features_are_projected_and_few_are_not():
    assert FeatureEncoder(2048, sparse=True).dim == 2048
    assert FeatureEncoder(2049, sparse=True).dim == 256
    assert FeatureEncoder(2049, sparse=True, hidden_layers=(9,)).dim == 9
    assert FeatureEncoder(2049, sparse=False).dim == 2049


def test_a_network_bends_and_a_projection_does_not():
    x = torch.randn(8, 40)
    projection = FeatureEncoder(40, sparse=True, rank=5)
    torch.testing.assert_close(projection(-x), -projection(x))
    assert (FeatureEncoder(40, sparse=True, hidden_layers=(5,))(x) >= 0).all()


def test_the_gradient_of_sparse_rows_holds_their_features_alone():
    encoder = FeatureEncoder(40, sparse=True, rank=5)
    rows = sparse_rows()
    encoder(as_inputs(rows)).sum().backward()
    (weight,) = encoder.sparse_parameters()
    assert weight.grad.is_sparse
    assert set(weight.grad.coalesce().indices()[0].tolist()) == set(rows.indices.tolist())


@pytest.mark.parametrize("hidden_layers", [(), (7,)])
def test_rows_without_features_have_a_vector(hidden_layers):
    encoder = FeatureEncoder(40, sparse=True, rank=5, hidden_layers=hidden_layers)
    empty = encoder(as_inputs(csr_array((3, 40))))
    assert empty.shape == (3, encoder.dim)
    empty.sum().backward()
    assert FeatureEncoder(40, sparse=True)(as_inputs(csr_array((3, 40)))).count_nonzero() == 0


def test_a_feature_named_twice_counts_twice():
    twice = csr_array((np.array([1.0, 2.0]), np.array([3, 3]), np.array([0, 2])), shape=(1, 40))
    once = csr_array((np.array([3.0]), np.array([3]), np.array([0, 1])), shape=(1, 40))
    for encoder in (FeatureEncoder(40, sparse=True), FeatureEncoder(40, sparse=True, rank=5)):
        torch.testing.assert_close(encoder(as_inputs(twice)), encoder(as_inputs(once)))


@pytest.mark.parametrize(("optimizer", "rate"), [(RowAdagrad, 0.02), (RowAdam, 0.02), (RowSGD, 0.2)])
def test_a_row_optimiser_learns_from_sparse_and_from_dense_rows(optimizer, rate):
    torch.manual_seed(0)
    encoder = FeatureEncoder(40, sparse=True, rank=4, hidden_layers=(8,))
    steps = optimizer(encoder.parameters(), rate)
    rows, wanted = sparse_rows(), torch.rand(6, 8)
    losses = []
    for i in range(60):
        inputs = as_inputs(rows if i % 2 else rows.toarray())
        loss = nn.functional.mse_loss(encoder(inputs), wanted)
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "`rank` must be at least 1, got 0"),
        ({"hidden_layers": (8, 0)}, "`hidden_layers` must be at least 1, got 0"),
    ],
)
def test_sizes_must_be_above_zero(options, message):
    with pytest.raises(ValueError, match=message):
        FeatureEncoder(40, sparse=False, **options)
    with pytest.raises(ValueError, match="`num_features` must be at least 1, got 0"):
        FeatureEncoder(0, sparse=False)
