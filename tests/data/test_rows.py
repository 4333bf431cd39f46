"""Rows of features, and training batches of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

from manyclass.data import RowBatches, Rows, as_inputs, class_counts
from manyclass.data import rows as rows_module


def several():
    """Make four rows of one, two, no and three labels."""
    return Rows(np.eye(4, dtype=np.float32), np.array([7, 1, 2, 3, 4, 5]), np.array([0, 1, 3, 3, 6]))


def test_dense_rows_are_a_matrix():
    rows = Rows(np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3))
    assert rows.inputs(np.array([2, 0])).tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_sparse_rows_are_columns_and_values(index):
    matrix = random_array((20, 9), density=0.3, rng=np.random.default_rng(0), dtype=np.float32, format="csr")
    matrix.indptr = matrix.indptr.astype(index)
    rows = Rows(matrix, np.arange(20))
    chosen = np.array([3, 3, 19, 0])
    inputs, other = rows.inputs(chosen), as_inputs(matrix[chosen])
    for name in ("columns", "starts", "values"):
        assert torch.equal(inputs[name], other[name])
    bags = torch.nn.functional.embedding_bag(
        inputs["columns"], torch.eye(9), inputs["starts"], mode="sum", per_sample_weights=inputs["values"]
    )
    assert np.array_equal(bags.numpy(), matrix[chosen].toarray())


def test_sparse_rows_without_features_are_rows():
    rows = Rows(csr_array((3, 5), dtype=np.float32), np.arange(3))
    inputs = rows.inputs(np.array([0, 2]))
    assert inputs["starts"].tolist() == [0, 0]
    assert len(inputs["columns"]) == len(inputs["values"]) == 0


def test_read_only_arrays_are_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((2, 2), dtype=np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    as_inputs(mapped)[0, 0] = 5
    assert mapped[0, 0] == 1


def test_the_number_of_labels_must_match_the_rows():
    with pytest.raises(ValueError, match="`labels` must have length 3, got 2"):
        Rows(np.zeros((3, 1), np.float32), np.arange(2))
    with pytest.raises(ValueError, match="`starts` must have length 4, got 3"):
        Rows(np.zeros((3, 1), np.float32), np.arange(2), np.arange(3))


def test_a_row_of_n_labels_gives_n_examples_of_weight_one_in_total():
    ((inputs, target, extras),) = RowBatches(several(), 10)
    assert target.tolist() == [7, 1, 2, 3, 4, 5]
    assert inputs.argmax(1).tolist() == [0, 1, 1, 3, 3, 3]
    assert extras["weight"].tolist() == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3])
    excluded = [{i for i in row if i >= 0} for row in extras["exclude"].tolist()]
    assert excluded == [set(), {2}, {1}, {4, 5}, {3, 5}, {3, 4}]


def test_rows_of_one_label_exclude_nothing():
    rows = Rows(np.eye(3, dtype=np.float32), np.array([2, 0, 1]))
    ((_, target, extras),) = RowBatches(rows, 5)
    assert target.tolist() == [2, 0, 1]
    assert extras == {}


def test_the_weight_of_a_row_is_divided_among_its_labels():
    weight = np.array([2, 4, 1, 3], dtype=np.float32)
    ((_, _, extras),) = RowBatches(several(), 10, weight=weight)
    assert extras["weight"].tolist() == [2, 2, 2, 1, 1, 1]


def test_only_chosen_rows_are_used():
    batches = RowBatches(several(), 10, chosen=np.array([1, 2, 3]))
    assert batches.targets.tolist() == [1, 2, 3, 4, 5]
    ((inputs, target, _),) = batches
    assert target.tolist() == [1, 2, 3, 4, 5]
    assert inputs.argmax(1).tolist() == [1, 1, 3, 3, 3]


@given(st.integers(0, 300), st.integers(1, 17), st.booleans())
def test_an_epoch_has_every_example_once(n, size, blocks):
    window, block = (64, 8) if blocks else (rows_module._SHUFFLE_EXAMPLES, rows_module._BLOCK_EXAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_SHUFFLE_EXAMPLES", window)
        patch.setattr(rows_module, "_BLOCK_EXAMPLES", block)
        rows = Rows(np.arange(n, dtype=np.float32)[:, None], np.arange(n))
        batches = RowBatches(rows, size, seed=3)
        found = [(inputs, target) for inputs, target, _ in batches]
    assert len(found) == len(batches) == -(-n // size)
    assert all(len(target) == size for _, target in found[:-1])
    assert all(torch.equal(inputs[:, 0].long(), target) for inputs, target in found)
    assert sorted(i for _, target in found for i in target.tolist()) == list(range(n))


def test_the_epoch_determines_the_order():
    batches = RowBatches(Rows(np.zeros((50, 1), np.float32), np.arange(50)), 5, seed=1)

    def order(epoch):
        batches.set_epoch(epoch)
        return [target.tolist() for _, target, _ in batches]

    first, second = order(0), order(1)
    assert first != second
    assert order(0) == first
    other = RowBatches(Rows(np.zeros((50, 1), np.float32), np.arange(50)), 5, seed=2)
    assert [target.tolist() for _, target, _ in other] != first


def test_a_batch_size_below_1_is_refused():
    with pytest.raises(ValueError, match="`size` must be at least 1, got 0"):
        RowBatches(several(), 0)


def test_classes_are_counted_in_parts(monkeypatch):
    monkeypatch.setattr(rows_module, "_SHUFFLE_EXAMPLES", 7)
    labels = np.random.default_rng(0).integers(0, 9, 100)
    assert np.array_equal(class_counts(labels, 12), np.bincount(labels, minlength=12))
    with pytest.raises(ValueError, match=r"`labels` must lie in \[0, 8\), got 8 at position"):
        class_counts(labels, 8)
