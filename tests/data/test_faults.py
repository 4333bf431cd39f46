# ruff: noqa: N806
"""Every row before a faulty one is read, in every format, and the fault is reported with its place."""

import gzip
import io
import time
import zipfile

import numpy as np
import pytest
import scipy.sparse
from numpy.lib import format as npy

from manyclass.data import Column, Names, Schema, open_rows, read_sequences
from manyclass.data.files import line_batches
from manyclass.errors import UserError

ROWS, BAD = 900, 700


def until_fault(values):
    """Return the values before a UserError, and its message."""
    found = []
    try:
        for value in values:
            found.append(value)
    except UserError as error:
        return found, str(error)
    raise AssertionError("there is no fault")


def csv_lines(separator, bad):
    lines = [separator.join((str(i % 7), str(i), "red" if i % 2 else "blue")) for i in range(ROWS)]
    lines[BAD] = bad.replace(",", separator)
    return "\n".join([separator.join(("label", "size", "colour")), *lines, ""]).encode("utf-8", "surrogateescape")


def svmlight(bad):
    lines = [f"{i % 7} 1:{i} 2:1" for i in range(ROWS)]
    lines[BAD] = bad
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


def matrix():
    return np.arange(1.0, 2 * ROWS + 1, dtype=np.float32).reshape(ROWS, 2)


def write_npy(path):
    X = matrix()
    X[BAD, 1] = np.nan
    np.save(path, X)


def write_npz(path):
    X = matrix()
    X[BAD, 1] = np.inf
    np.savez(path, X=X, y=np.arange(ROWS))


def write_label_npz(path):
    y = np.array([str(i) for i in range(ROWS)])
    y[BAD] = ""
    np.savez(path, X=matrix(), y=y)


def write_sparse(path, change):
    X = scipy.sparse.csr_array(matrix())
    arrays = {"data": X.data, "indices": X.indices.copy(), "indptr": X.indptr.copy()}
    change(arrays)
    np.savez(path, **arrays, shape=np.array(X.shape), format=np.array(b"csr"))


def bad_index(arrays):
    arrays["indices"][2 * BAD] = 9


def bad_start(arrays):
    arrays["indptr"][BAD + 1] = 1


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    size = np.arange(float(ROWS))
    size[BAD] = np.inf
    parquet.write_table(pyarrow.table({"label": [str(i % 7) for i in range(ROWS)], "size": size}), path)


def write_broken_text(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [b"red"] * ROWS
    texts[BAD] = b"\xff\xfe"
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"label": [str(i % 7) for i in range(ROWS)], "colour": column}), path)


def text(content):
    return lambda path: path.write_bytes(content)


LINE, ROW = f"in line {BAD + 1} of", f"in row {BAD}"
FAULTS = {
    "svmlight, value": ("a.svm", text(svmlight("1 1:x")), LINE),
    "svmlight, index": ("a.svm", text(svmlight("1 0:1")), LINE),
    "svmlight, encoding": ("a.svm", text(svmlight("1\udcff 1:1")), LINE),
    "svmlight, NUL": ("a.svm", text(svmlight("1 1:\0")), LINE),
    "csv, number": ("a.csv", text(csv_lines(",", "1,x,red")), f"in line {BAD + 2} of"),
    "csv, length": ("a.csv", text(csv_lines(",", "1,2")), f"in line {BAD + 2} of"),
    "csv, quote": ("a.csv", text(csv_lines(",", '1,2,"red"x')), f"in line {BAD + 2} of"),
    "csv, far larger": ("a.csv", text(csv_lines(",", "1,1e300,red")), f"in line {BAD + 2} of"),
    "csv, label": ("a.csv", text(csv_lines(",", ",2,red")), f"in line {BAD + 2} of"),
    "csv, encoding": ("a.csv", text(csv_lines(",", "1,2,\udcff")), f"in line {BAD + 2} of"),
    "tsv, number": ("a.tsv", text(csv_lines("\t", "1,x,red")), f"in line {BAD + 2} of"),
    "npy": ("a.npy", write_npy, ROW),
    "npz": ("a.npz", write_npz, ROW),
    "npz, label": ("a.npz", write_label_npz, ROW),
    "sparse npz, index": ("a.npz", lambda path: write_sparse(path, bad_index), ROW),
    "sparse npz, start": ("a.npz", lambda path: write_sparse(path, bad_start), ROW),
    "parquet, number": ("a.parquet", write_parquet, ROW),
    "parquet, encoding": ("a.parquet", write_broken_text, ROW),
}


def good_schema(path):
    """Return the schema of the same rows without a fault."""
    good = path.with_name(f"good{path.suffix}")
    if path.suffix == ".svm":
        good.write_bytes(svmlight("1 1:1 2:1"))
    elif path.suffix in (".csv", ".tsv"):
        good.write_bytes(csv_lines("," if path.suffix == ".csv" else "\t", "1,2,red"))
    else:
        return None
    reader = open_rows(good)
    assert sum(map(len, reader.chunks())) == ROWS
    return reader.schema


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_before_a_faulty_one_are_read(tmp_path, fault):
    name, write, place = FAULTS[fault]
    path = tmp_path / name
    write(path)
    schema = good_schema(path)
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = {"label": ["a", "b"], **({"size": [1.0, 2.0]} if "number" in fault else {"colour": ["a", "b"]})}
        parquet.write_table(pyarrow.table(columns), tmp_path / "good.parquet")
        schema = open_rows(tmp_path / "good.parquet").schema
    found, message = until_fault(open_rows(path, schema=schema).chunks())
    assert sum(map(len, found)) == BAD
    assert place in message
    assert "\n" not in message


def test_the_first_of_several_faulty_rows_is_reported(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv_lines(",", "1,2,red"))
    schema = open_rows(path).schema
    lines = path.read_text().splitlines()
    lines[500], lines[400], lines[300] = ",1,red", "1,1e300,red", "1,x,red"
    path.write_text("\n".join(lines))
    found, message = until_fault(open_rows(path, schema=schema).chunks())
    assert sum(map(len, found)) == 299
    assert "in line 301 of" in message


def test_lines_before_the_end_of_a_cut_off_archive_are_read(tmp_path):
    path = tmp_path / "a.txt.gz"
    data = gzip.compress("\n".join(str(i) for i in range(100_000)).encode())
    path.write_bytes(data[: len(data) // 2])
    found, message = until_fault(line for batch in line_batches(path, 1000) for line in batch)
    assert "must be a file that can be read" in message
    assert len(found) > 10_000
    assert found[-1][1] == str(len(found) - 1)


def test_interactions_before_a_faulty_line_are_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("ann a\nben b\nann b\nben\nann a\n")
    sequences = read_sequences(path, item_names=Names("ab"), until_fault=True)
    assert sequences.items.tolist() == [0, 1, 1]
    assert "in line 4 of" in str(sequences.fault)
    with pytest.raises(UserError, match="in line 4 of"):
        read_sequences(path, item_names=Names("ab"))


@pytest.mark.parametrize(
    "shape", [(1 << 62, 4), (1 << 32, 1 << 32), (1 << 63, 2), (1 << 64, 1), (0, 1 << 63), (-1, 4), (True, 4)]
)
def test_an_impossible_shape_is_refused_with_the_bytes_it_needs(tmp_path, shape):
    content = io.BytesIO()
    npy.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": shape})
    content.write(b"\0" * 16)
    (tmp_path / "a.npy").write_bytes(content.getvalue())
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X.npy", content.getvalue())
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UserError, match=r"is impossible$|needs \d{2,3}(,\d{3}){6} bytes, got 144$"):
            open_rows(tmp_path / name)


def test_a_packed_schema_comes_back():
    columns = (Column("size", "number", 2.5, 0.1), Column("colour", "text"))
    schema = Schema("csv", 17, sparse=True, label="y", columns=columns, width=16)
    packed = schema.packed()
    assert Schema.from_json(packed) == schema
    for name in ("names", "number", "mean", "scale"):
        for broken in (None, packed["columns"]["mean"][:1]):
            with pytest.raises(UserError, match="`schema` must have columns of a name, a type, a mean and a scale"):
                Schema.from_json({**packed, "columns": {**packed["columns"], name: broken}})


def seconds_to_open(path, columns, cell):
    names = ",".join(f"c{i}" for i in range(columns))
    path.write_text("\n".join([f"label,{names}", *(f"{i},{','.join([cell] * columns)}" for i in "ab")]) + "\n")
    started = time.process_time()
    reader = open_rows(path)
    schema = Schema.from_json(reader.schema.to_json())
    assert schema == reader.schema
    assert sum(map(len, open_rows(path, schema=schema).chunks())) == 2
    return time.process_time() - started


@pytest.mark.machine
@pytest.mark.parametrize("cell", ["1", "red"])
def test_columns_cost_linear_time(tmp_path, cell):
    seconds_to_open(tmp_path / "a.csv", 10, cell)
    few, many = (min(seconds_to_open(tmp_path / "a.csv", n, cell) for _ in range(2)) for n in (3_000, 24_000))
    # Eight times as many columns took over 40 times as long when their time was quadratic.
    assert many < 20 * few
