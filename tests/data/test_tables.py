"""Rows of CSV, TSV and Parquet."""

import datetime
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from manyclass.data import Schema, open_rows
from manyclass.data._hashing import hashed
from manyclass.errors import UserError


@pytest.fixture
def table(tmp_path):
    def table(content, name="a.csv", **options):
        path = tmp_path / name
        if isinstance(content, dict):
            pyarrow.parquet.write_table(pyarrow.table(content), path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return open_rows(path, **options)

    return table


def rows(reader):
    chunks = list(reader.chunks())
    labels = None if chunks[0].labels is None else [row for chunk in chunks for row in chunk.labels]
    parts = [chunk.features if isinstance(chunk.features, np.ndarray) else chunk.features.toarray() for chunk in chunks]
    return np.concatenate(parts), labels


NUMBERS = "a,b,label\n1,10,x\n2,20,y\n3,60,x\n"


def test_numbers_are_standardised(table):
    reader = table(NUMBERS)
    features, labels = rows(reader)
    expected = np.array([[1, 10], [2, 20], [3, 60]], dtype=float)
    assert features == pytest.approx((expected - expected.mean(0)) / expected.std(0), rel=1e-6)
    assert features.dtype == np.float32
    assert labels == [("x",), ("y",), ("x",)]
    assert reader.schema.num_features == 2
    assert not reader.schema.sparse


@pytest.mark.parametrize("missing", ["", "NA", "n/a", "NaN", "null", "None", " "])
def test_a_missing_number_counts_as_the_mean(table, missing):
    reader = table(f"a,label\n1,x\n{missing},x\n5,y\n")
    assert rows(reader)[0].ravel().tolist() == [-1, 0, 1]
    assert (reader.schema.columns[0].mean, reader.schema.columns[0].scale) == (3, 2)


def test_a_constant_column_gives_zeros(table):
    assert rows(table("a,b,label\n0.1,7,x\n0.1,,x\n0.1,7,y\n"))[0] == pytest.approx(np.zeros((3, 2)), abs=1e-12)


def test_words_are_hashed_by_column_in_lower_case(table):
    reader = table("n,says,means,label\n1,Hello hello,you,x\n3,hello,hello,y\n", width=64)
    features, _ = rows(reader)
    assert reader.schema.num_features == 65
    assert features[:, 0].tolist() == [-1, 1]
    says = hashed([("says", ["hello"])], 64).toarray()[0]
    assert features[0, 1:] == pytest.approx(says + hashed([("means", ["you"])], 64).toarray()[0])
    assert features[1, 1:] == pytest.approx(says + hashed([("means", ["hello"])], 64).toarray()[0])
    assert np.abs(says).sum() == 1


def test_hashes_are_the_same_everywhere():
    assert hashed([("a", ["one two"])], 2**18).indices.tolist() == [36497, 233894]


def test_the_label_column_is_found_by_its_name_or_given(table):
    assert rows(table("Class,y2\nx,1\nz,2\n"))[1] == [("x",), ("z",)]
    assert rows(table("y,target\n1,p\n2,q\n"))[1] == [("p",), ("q",)]
    assert rows(table("a,b\n1,p\n2,q\n", label="b"))[1] == [("p",), ("q",)]
    with pytest.raises(
        UserError, match=r"a column called label, target, class, y, or one `label` names, got 'a', 'b' in"
    ):
        table("a,b\n1,p\n")
    with pytest.raises(UserError, match=r"`label` must be a column of .*a\.csv, one of 'a', 'b', got 'c'"):
        table("a,b\n1,p\n", label="c")


def test_quoted_cells_may_hold_line_ends_and_a_byte_order_mark_is_dropped(table):
    reader = table('\ufefflabel,says\r\nx,"one, ""two""\r\nthree"\r\ny,four\r\n', width=32)
    assert reader.schema.columns[0].name == "says"
    features, labels = rows(reader)
    assert labels == [("x",), ("y",)]
    assert features[0] == pytest.approx(hashed([("says", ["one two three"])], 32).toarray()[0])


def test_tabs_may_stand_between_cells(table):
    assert rows(table("a\tlabel\n1\tx, y\n2\tz\n", "a.tsv"))[1] == [("x, y",), ("z",)]


@pytest.mark.parametrize("number", ["1.5", "0", "", "-1e3"])
def test_a_later_cell_that_is_no_number_is_named(table, number, monkeypatch):
    monkeypatch.setattr("manyclass.data.tables._SAMPLE_ROWS", 1)
    monkeypatch.setattr("manyclass.data._csv._MAX_BATCH_ROWS", 2)
    with pytest.raises(UserError, match=r"finite numbers in column 'a', got 'many' in line 6 of .*a\.csv"):
        table(f"a,label\n1,x\n2,y\n{number},x\n\nmany,y\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have a header line and rows, got nothing in"),
        ("a,label\n", "must hold rows, got none in"),
        ("label\nx\n", "must have a column besides its labels, got 'label' in"),
        ("a,label\n1,x\n2\n", "must have 2 cells, as its header has, got 1 in line 3 of"),
        ('a,label\n"1\n2",x\n3,y,z\n', "must have 2 cells, as its header has, got 3 in line 4 of"),
        ('a,label\n"1"2,x\n', r"must be CSV, got a malformed record .* in line 2 of"),
        ('a,label\n1,x\n"2,y\n', r"must be CSV, got a malformed record \(unexpected end of data\) in line 3 of"),
        ("a,a,label\n1,2,x\n", "columns of different names, got 'a' twice in"),
        (",a,label\n0,1,x\n", "a name for each column, got none for column 1; leave out a row index in"),
        ("a,label\n1,x\n2,\n", "must have a label in each row, got an empty one in column 'label' in line 3 of"),
        (f"a,label\n1,{'x' * 1001}\n", "got one of 1,001 in column 'label' in line 2 of"),
        ("a,label\n1,x\n1e308,y\n-1e308,x\n", "numbers near the others of column 'a', got a far .* in line 3 of"),
        (b"a,label\n1,\xff\n", "must be UTF-8, got byte 0xff in line 2 of"),
        (b"a,label\n1,x\0\n", "must be text, got a NUL byte in line 2 of"),
    ],
)
def test_a_malformed_table_is_refused(table, content, message):
    with pytest.raises(UserError, match=message):
        rows(table(content))


def test_infinite_numbers_are_refused(table, monkeypatch):
    monkeypatch.setattr("manyclass.data.tables._SAMPLE_ROWS", 1)
    monkeypatch.setattr("manyclass.data._csv._MAX_BATCH_ROWS", 1)
    with pytest.raises(UserError, match="finite numbers in column 'a', got 'inf' in line 3 of"):
        table("a,label\n1,x\ninf,y\n")
    with pytest.raises(UserError, match=r"finite numbers in column 'a', got 'inf' in row 1 of .*parquet"):
        table({"a": [1.0, np.inf], "label": ["x", "y"]}, "a.parquet")


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(table):
    with pytest.raises(UserError, match=r"field larger than field limit \(16777216\)\) in line 2 of"):
        table('a,label\n"' + "1\n" * (9 << 20))


TRAIN = "a,says,label\n1,red,x\n3,blue,y\n"


def test_another_file_gives_the_same_features(table):
    schema = Schema.from_json(json.loads(json.dumps(table(TRAIN, width=128).schema.to_json())))
    trained, _ = rows(table(TRAIN, width=128))
    again, labels = rows(table("extra,says,label,a\n9,blue,y,3\n9,red,x,1\n", schema=schema))
    assert np.array_equal(again, trained[::-1])
    assert labels == [("y",), ("x",)]
    parquet = table({"says": ["red", "blue"], "a": [1, 3]}, "a.parquet", schema=schema)
    assert not parquet.labelled
    assert np.array_equal(rows(parquet)[0], trained)
    assert rows(parquet)[1] is None


def test_a_file_without_the_model_s_columns_is_refused(table):
    schema = table(TRAIN).schema
    with pytest.raises(UserError, match=r"must have the column 'says', as the model's had, got 'a', 'label' in"):
        table("a,label\n1,x\n", schema=schema)
    with pytest.raises(UserError, match="must hold number in column 'a', got text in"):
        table({"a": ["p"], "says": ["q"]}, "a.parquet", schema=schema)
    with pytest.raises(UserError, match="finite numbers in column 'a', got 'p' in line 2 of"):
        rows(table("a,says,label\np,q,x\n", schema=schema))


def test_parquet_has_numbers_dates_and_text(table):
    day = datetime.date(2020, 1, 1)
    content = {
        "whole": [1, None, 3],
        "real": [0.5, float("nan"), 1.5],
        "truth": [True, False, None],
        "day": [day, day, day + datetime.timedelta(2)],
        "category": pyarrow.array(["p", "q", None]).dictionary_encode(),
        "label": pyarrow.array([7, 8, 7], type=pyarrow.int8()),
    }
    reader = table(content, "a.parquet", width=16)
    assert [column.type for column in reader.schema.columns] == ["number"] * 4 + ["text"]
    features, labels = rows(reader)
    assert features.shape == (3, 20)
    assert features[:, 0] == pytest.approx([-1, 0, 1])
    assert features[:, 1] == pytest.approx([-1, 0, 1])
    assert features[:, 3] == pytest.approx([-(0.5**0.5), -(0.5**0.5), 2**0.5])
    assert np.abs(features[:, 4:]).sum(1).tolist() == [1, 1, 0]
    assert labels == [("7",), ("8",), ("7",)]


def test_parquet_and_csv_give_the_same_features(table):
    parquet = table({"a": [1, 3], "says": ["red", "blue"], "label": ["x", "y"]}, "a.parquet")
    csv = table(TRAIN)
    assert parquet.schema.columns == csv.schema.columns
    assert np.array_equal(rows(parquet)[0], rows(csv)[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": [[1, 2]], "label": ["x"]}, r"numbers or text in each column, got list<.*> in 'a' in"),
        ({"a": [1, 2], "label": ["x", None]}, "got an empty one in column 'label' in row 1 of"),
        (b"PAR1 no more", "must be Parquet"),
        (b"", "must hold rows, got nothing in"),
        ({"a": pyarrow.array([], pyarrow.int64()), "label": pyarrow.array([], pyarrow.string())}, "rows, got none in"),
    ],
)
def test_malformed_parquet_is_refused(table, content, message):
    with pytest.raises(UserError, match=message):
        rows(table(content, "a.parquet"))


def test_without_pyarrow_the_error_names_it(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"needs pyarrow: pip install 'manyclass\[parquet\]'"):
        table(b"PAR1", "a.parquet")


def test_a_long_table_is_read_in_chunks(table):
    content = "a,label\n" + "".join(f"{i % 10},{i % 3}\n" for i in range(10_000))
    seen = []
    reader = table(content, progress=lambda *at: seen.append(at))
    assert [len(chunk) for chunk in reader.chunks()] == [4096, 4096, 1808]
    assert seen[-1] == (reader.size, reader.size)
    assert reader.schema.columns[0].mean == pytest.approx(4.5)
    assert reader.schema.columns[0].scale == pytest.approx(np.arange(10).std())
