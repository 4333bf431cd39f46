"""Rows in svmlight's format."""

import gzip
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file

from manyclass.data import Schema, open_rows
from manyclass.data._pairs import pairs
from manyclass.errors import UserError


@pytest.fixture
def read(tmp_path):
    def read(content, **options):
        path = tmp_path / "a.svm"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        reader = open_rows(path, **options)
        chunks = list(reader.chunks())
        features = np.concatenate([dense(chunk.features, reader.schema.num_features) for chunk in chunks])
        return features.tolist(), [row for chunk in chunks for row in chunk.labels], reader.schema

    return read


def dense(features, width):
    features = features if isinstance(features, np.ndarray) else features.toarray()
    return np.pad(features, ((0, 0), (0, width - features.shape[1])))


def test_features_count_from_one_if_none_is_zero(read):
    features, labels, schema = read("a 1:0.5 3:2\nb 2:-1\n")
    assert features == [[0.5, 0, 2], [0, -1, 0]]
    assert labels == [("a",), ("b",)]
    assert not schema.zero_based
    assert schema.num_features == 3


def test_features_count_from_zero_if_one_is_zero_anywhere(read):
    features, _, schema = read("a 1:0.5\nb 0:3 1:4\n")
    assert features == [[0, 0.5], [3, 4]]
    assert schema.zero_based
    assert read("0:1 1:1\nb 1:4\n")[2].zero_based


def test_a_comment_or_a_value_is_no_feature_zero(read):
    assert not read("a 1:0 2:1 # 0:1\nb 10:5\n")[2].zero_based


def test_the_first_index_can_be_given(read):
    assert read("a 1:1\nb 1:2\n", zero_based=True)[0] == [[0, 1], [0, 2]]
    with pytest.raises(UserError, match="indices of at least 1, got 0 in line 2 of"):
        read("a 1:1\nb 0:2\n", zero_based=False)


def test_a_header_gives_the_number_of_rows_and_features(read):
    features, labels, schema = read("3 4 9\n0,5 0:1 3:2\n 1:1\n7 2:1\n")
    assert features == [[1, 0, 0, 2], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert labels == [("0", "5"), (), ("7",)]
    assert schema.num_features == 4
    assert schema.zero_based


def test_a_header_counts_rows_that_are_blank(read):
    assert read("3 2 2\n0 0:1\n\n1 1:1\n\n\n")[1] == [("0",), (), ("1",)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("3 4 9\n0 0:1\n", "must hold 3 rows, as its header says, got 1 in"),
        ("1 4 9\n0 0:1\n1 0:1\n", "must hold 1 rows, as its header says, got 2 in"),
        ("1000000000000 4 9\n0 0:1\n", "must hold 1,000,000,000,000 rows, as its header says, got 1 in"),
        ("1 4 9\n0 4:1\n", r"at most 3 \(4 features, as its header says\), got 4 in line 2 of"),
        ("1 0 9\n0 4:1\n", "from 1 to 2,147,483,647 features in its header, got 0"),
        ("1 99999999999 9\n0 4:1\n", "features in its header, got 99,999,999,999"),
    ],
)
def test_a_wrong_header_is_refused(read, content, message):
    with pytest.raises(UserError, match=message):
        read(content)


def test_rows_may_have_several_labels_or_none(read):
    assert read("a,b 1:1\n 1:1\n1:1\nc,c 1:1\n")[1] == [("a", "b"), (), (), ("c",)]


def test_labels_stay_as_they_are_written(read):
    assert read("3.0 1:1\n+1 1:1\n-1 1:1\nő 1:1\n007\n")[1] == [("3.0",), ("+1",), ("-1",), ("ő",), ("007",)]


def test_comments_queries_tabs_and_blank_lines_are_ignored(read):
    content = "# all of it\n\na qid:7 1:1  3:2 # one\n\n  \t\nb\t2:5 \t\r\nc 3:1"
    features, labels, _ = read(content)
    assert features == [[1, 0, 2], [0, 5, 0], [0, 0, 1]]
    assert labels == [("a",), ("b",), ("c",)]


def test_features_may_come_in_any_order(read):
    assert read("a 3:1 1:2\nb 2:1\n")[0] == [[2, 0, 1], [0, 1, 0]]


NUMBERS = ["1", "0.25", "-3", ".5", "5.", "1e3", "-2.5E-2", "+4", "123456.75", "0.1000000014901161", "-0"]


@pytest.mark.parametrize("value", NUMBERS)
def test_values_are_numbers_of_any_form(read, value):
    assert read(f"a 1:{value} 2:7\nb 1:1\n")[0][0] == [np.float32(value), 7]


def test_a_row_of_very_many_features_is_read(read):
    values = np.random.default_rng(0).integers(-999, 999, 300_000)
    row = " ".join(f"{i}:{value / 100}" for i, value in enumerate(values, 1))
    features, _, _ = read(f"a {row}\nb 1:1\n")
    assert np.array_equal(features[0], (values / 100).astype(np.float32))


@given(st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e9, 1e9)), min_size=1), st.sampled_from("gf"))
def test_numbers_are_read_as_python_reads_them(found, form):
    texts = [(i, f"{value:{form}}") for i, value in found]
    index, value = pairs(" ".join(f"{i}:{text}" for i, text in texts).encode(), len(texts))
    assert index.tolist() == [i for i, _ in texts]
    assert value.tolist() == [pytest.approx(float(text), rel=1e-15) for _, text in texts]


def test_a_file_written_by_scikit_learn_is_read(tmp_path):
    draw = np.random.default_rng(0)
    x = np.where(draw.random((500, 30)) < 0.3, draw.normal(size=(500, 30)), 0)
    path = tmp_path / "a.libsvm"
    dump_svmlight_file(x, draw.integers(0, 5, 500), str(path), zero_based=False)
    (chunk,) = open_rows(path).chunks()
    assert np.array_equal(dense(chunk.features, 30), x.astype(np.float32))


def test_a_long_file_is_read_in_chunks_with_their_progress(tmp_path):
    path = tmp_path / "a.svm.gz"
    rows = 200_000
    path.write_bytes(gzip.compress(b"".join(b"%d %d:1\n" % (i % 7, i % 50 + 1) for i in range(rows)), 1))
    seen = []
    reader = open_rows(path, progress=lambda *at: seen.append(at))
    sizes, done = zip(*((len(chunk), chunk.done) for chunk in reader.chunks()), strict=True)
    assert len(sizes) > 1
    assert sum(sizes) == rows
    assert sorted(done) == list(done)
    assert done[-1] == reader.size == path.stat().st_size
    assert seen[-1] == (reader.size, reader.size)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a 1:x", "features index:value, got '1:x'"),
        ("a x:1", "features index:value, got 'x:1'"),
        ("a 1.0:1", "features index:value, got '1.0:1'"),
        ("a 1:", "features index:value, got '1:'"),
        ("a :1", "features index:value, got ':1'"),
        ("a 1:2:3", "features index:value, got '1:2:3'"),
        ("a 1:1_0", "features index:value, got '1:1_0'"),
        ("a 1:0x1", "features index:value, got '1:0x1'"),
        ("a b 1:2", "features index:value, got 'b'"),
        ("a 1: 2", "features index:value, got '1:'"),
        ("a 1:--2", "features index:value, got '1:--2'"),
        ("a 1:1.2.3", "features index:value, got '1:1.2.3'"),
        ("a 1:nan", "finite values, in 32 bits, got 'nan' for feature 1"),
        ("a 1:-inf", "finite values, in 32 bits, got '-inf'"),
        ("a 1:1e39", "finite values, in 32 bits, got '1e39'"),
        ("a -1:1", "indices of at least 1, got -1"),
        ("a 2147483648:1", "at most 2,147,483,647, got 2,147,483,648"),
        ("a 99999999999999999999999:1", "at most 2,147,483,647, got 99,"),
        ("a,,b 1:1", "got an empty one"),
        ("a, 1:1", "got an empty one"),
        (", 1:1", "got an empty one"),
        ("a" * 1001 + " 1:1", "labels of at most 1,000 characters, got one of 1,001"),
    ],
)
def test_a_line_that_is_no_row_is_named(read, line, message):
    with pytest.raises(UserError, match=f"{message}.* in line 3 of .*a.svm"):
        read(f"ok 1:1\n\n{line}\nok 1:1\n")


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing\n", "\ufeff"])
def test_a_file_without_rows_is_refused(read, content):
    with pytest.raises(UserError, match="must hold rows, got none in"):
        read(content)


def test_a_file_without_features_is_refused(read):
    with pytest.raises(UserError, match="must hold features index:value, got none in"):
        read("just\nwords\n")


def test_a_model_fixes_the_number_of_features_and_the_first_index(read):
    schema = Schema("svmlight", 5, sparse=True, zero_based=False)
    features, _, same = read("a 2:1\n", schema=schema)
    assert features == [[0, 1, 0, 0, 0]]
    assert same == schema
    with pytest.raises(UserError, match=r"at most 5 \(5 features, as the model has\), got 6 in line 1 of"):
        read("a 6:1\n", schema=schema)
    with pytest.raises(UserError, match="must have 5 features, as the model has, got 7 in its header"):
        read("1 7 2\na 6:1\n", schema=schema)


def test_a_model_of_dense_rows_gets_dense_rows(read):
    features, _, _ = read("a 2:1\n", schema=Schema("npy", 3, sparse=False))
    assert features == [[0, 0, 1]]


def test_rows_can_be_read_again(tmp_path):
    path = tmp_path / "a.svm"
    path.write_text("a 1:1\nb 2:1\n")
    reader = open_rows(path)
    assert [sum(map(len, reader.chunks())) for _ in range(2)] == [2, 2]
    assert math.prod(next(reader.chunks()).features.shape) == 4
