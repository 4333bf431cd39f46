"""Rows in NumPy's files."""

import io
import pickle
import zipfile

import numpy as np
import pytest
from scipy.sparse import csc_array, csr_array, random_array, save_npz

from manyclass.data import Schema, open_rows
from manyclass.data import arrays as arrays_module
from manyclass.errors import UserError

X = np.arange(12, dtype=np.float64).reshape(4, 3)
Y = np.array([5, 6, 5, 7])


def read(path, **options):
    reader = open_rows(path, **options)
    chunks = list(reader.chunks())
    parts = [chunk.features if isinstance(chunk.features, np.ndarray) else chunk.features.toarray() for chunk in chunks]
    labels = None if chunks[0].labels is None else [row for chunk in chunks for row in chunk.labels]
    return np.concatenate(parts), labels, reader


@pytest.fixture(params=[np.savez, np.savez_compressed], ids=["stored", "packed"])
def save(request):
    return request.param


def test_an_archive_has_rows_and_labels(tmp_path, save):
    save(tmp_path / "a.npz", X=X, y=Y)
    features, labels, reader = read(tmp_path / "a.npz")
    assert features.dtype == np.float32
    assert np.array_equal(features, X)
    assert labels == [("5",), ("6",), ("5",), ("7",)]
    assert reader.schema == Schema("npz", 3, sparse=False)
    assert reader.labelled


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.uint64, bool, ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_may_have_any_number_dtype_and_memory_order(tmp_path, save, dtype, order):
    x = np.asarray(X % 2, dtype=dtype, order=order)
    save(tmp_path / "a.npz", X=x)
    np.save(tmp_path / "a.npy", x)
    for name in ("a.npz", "a.npy"):
        features, labels, reader = read(tmp_path / name)
        assert np.array_equal(features, X % 2)
        assert labels is None
        assert not reader.labelled


@pytest.mark.parametrize("y", [["a", "b", "ő", "a"], [b"a", b"b", "ő".encode(), b"a"]])
def test_labels_may_be_text(tmp_path, y):
    np.save(tmp_path / "a.npy", X)
    np.save(tmp_path / "y.npy", np.array(y))
    assert read(tmp_path / "a.npy", labels=tmp_path / "y.npy")[1] == [("a",), ("b",), ("ő",), ("a",)]


def test_sparse_rows_of_scipy_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays_module, "_MAX_CHUNK_ROWS", 7)
    x = random_array((100, 40), density=0.1, rng=np.random.default_rng(0), format="csr")
    save_npz(tmp_path / "a.npz", x)
    np.save(tmp_path / "y.npy", np.arange(100))
    features, labels, reader = read(tmp_path / "a.npz", labels=tmp_path / "y.npy")
    assert np.array_equal(features, x.toarray().astype(np.float32))
    assert labels == [(str(i),) for i in range(100)]
    assert reader.schema == Schema("npz", 40, sparse=True)
    assert isinstance(next(reader.chunks()).features, csr_array)
    assert [len(chunk) for chunk in reader.chunks()] == [7] * 14 + [2]


def test_dense_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch, save):
    monkeypatch.setattr(arrays_module, "_MAX_CHUNK_ROWS", 3)
    x = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)
    save(tmp_path / "a.npz", X=x, y=np.arange(10))
    features, labels, reader = read(tmp_path / "a.npz")
    assert np.array_equal(features, x)
    assert labels == [(str(i),) for i in range(10)]
    assert [chunk.done for chunk in reader.chunks()][-1] == reader.size


def test_a_model_of_sparse_rows_gets_sparse_rows(tmp_path):
    np.save(tmp_path / "a.npy", X)
    chunk = next(open_rows(tmp_path / "a.npy", schema=Schema("svmlight", 3, sparse=True)).chunks())
    assert isinstance(chunk.features, csr_array)
    assert np.array_equal(chunk.features.toarray(), X)


def broken(**arrays):
    return lambda path: np.savez(path, **arrays)


CSR = {
    "data": np.ones(2),
    "indices": np.array([0, 2]),
    "indptr": np.array([0, 1, 2]),
    "shape": (2, 3),
    "format": b"csr",
}


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (broken(y=Y), "must have an array X, or those of a sparse matrix .* got 'y' in"),
        (broken(X=X[0]), r"must be a matrix \[N, F\], got shape \[3\] in"),
        (broken(X=X[:, :0]), r"must be a matrix \[N, F\], got shape \[4, 0\] in"),
        (broken(X=X[:0]), "must hold rows, got none in"),
        (broken(X=X.astype(str)), "must hold numbers, got <U32 in"),
        (broken(X=X * 1j), "must hold numbers, got complex128 in"),
        (broken(X=X, y=Y[:3]), r"`y` must have a label for each of 4 rows, got shape \[3\] in"),
        (broken(X=X, y=Y[:, None]), r"`y` must have a label for each of 4 rows, got shape \[4, 1\] in"),
        (broken(X=X, y=Y / 2), "`y` must hold ints or strings, got float64 in"),
        (broken(X=X, y=np.array(["a", "", "b", "c"])), "got an empty one in row 1 of"),
        (broken(X=X, y=np.array(["a" * 1001] * 4)), "labels of at most 1,000 characters, got <U1001 in"),
        (broken(X=X, y=np.array([b"\xff"] * 4)), "labels of Unicode characters"),
        (broken(X=np.where(X == 7, np.nan, X)), "finite values, in 32 bits, got nan in row 2, column 1 in"),
        (broken(X=X * 1e40), "finite values, in 32 bits, got inf in row 0, column 1 in"),
        (broken(X=X.astype(object)), "it holds Python objects, which are not loaded"),
        (broken(**{**CSR, "indices": np.array([0, 3])}), r"sparse indices in \[0, 3\), got 3 in row 1 in"),
        (broken(**{**CSR, "indices": np.array([-1, 0])}), r"sparse indices in \[0, 3\), got -1 in row 0 in"),
        (broken(**{**CSR, "indptr": np.array([0, 5, 2])}), "within 2 values, got an end at 5 in row 0"),
        (broken(**{**CSR, "indptr": np.array([0, 2, 1])}), "within 2 values, got an end at 1 in row 1"),
        (broken(**{**CSR, "indptr": np.array([0, 1, 1])}), "within 2 values, got an end at 1 in row 1"),
        (broken(**{**CSR, "indptr": np.array([1, 1, 2])}), "sparse rows that start at 0, got 1"),
        (broken(**{**CSR, "data": np.ones(3)}), r"as many sparse values as indices, got \[3\] and \[2\]"),
        (broken(**{**CSR, "shape": (10**12, 3)}), r"got \[1000000000000, 3\] and 3 starts"),
        (broken(**{**CSR, "data": np.array([1, np.inf])}), "got inf in row 1, column 2 in"),
        (lambda path: save_npz(path, csc_array(X)), "must hold a sparse matrix as CSR, got 'csc' in"),
        (lambda path: path.write_bytes(b"nothing of the kind"), r"must be a \.npz archive"),
        (lambda path: path.write_bytes(b""), r"must be a \.npz archive"),
    ],
)
def test_a_malformed_archive_is_refused(tmp_path, write, message):
    path = tmp_path / "a.npz"
    write(path)
    with pytest.raises(UserError, match=message):
        read(path)


def header(shape, *, descr="<f4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def test_a_header_that_claims_too_much_is_refused_without_allocating(tmp_path):
    content = header((10**12, 10)) + b"few"
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X.npy", content)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UserError, match=r"needs 40,000,000,000,\d+ bytes, got"):
            read(tmp_path / name)


def test_a_dense_row_has_a_maximum_size(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        content = header((1, 17 << 20), descr="|b1")
        archive.writestr("X.npy", content + bytes(17 << 20))
    with pytest.raises(UserError, match="dense rows of at most 64 MiB, got 17,825,792 features"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("shape", "data"), [((2, 2), bytes(20)), ((-1, 3), bytes(12)), ((2**62, 4), bytes(16)), ((2**64, 4), b"")]
)
def test_a_shape_that_does_not_fit_its_bytes_is_refused(tmp_path, shape, data):
    (tmp_path / "a.npy").write_bytes(header(shape) + data)
    with pytest.raises(UserError, match="must hold an array that can be read"):
        read(tmp_path / "a.npy")


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it ran')",))


def test_pickles_are_never_run(tmp_path):
    trap = pickle.dumps(Trap())
    (tmp_path / "a.npy").write_bytes(trap)
    (tmp_path / "b.npy").write_bytes(header((1,), descr="|O") + trap)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", np.array([Trap()] * 4, dtype=object), allow_pickle=True)
    for name in ("a.npy", "b.npy"):
        with pytest.raises(UserError, match="must hold an array that can be read"):
            read(tmp_path / name)
    with pytest.raises(UserError, match=r"`labels` must hold an array that can be read, .*: it holds Python objects"):
        read(tmp_path / "x.npy", labels=tmp_path / "y.npy")


def test_another_number_of_features_than_the_model_s_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(UserError, match="must have 9 features, as the model has, got 3 in"):
        open_rows(tmp_path / "a.npy", schema=Schema("npy", 9, sparse=False))


def test_errors_in_a_file_of_labels_name_that_file(tmp_path):
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(UserError, match=r"`labels` must be a file that can be read, .*none\.npy: No such file"):
        open_rows(tmp_path / "a.npy", labels=tmp_path / "none.npy")
    np.save(tmp_path / "y.npy", Y[:2])
    with pytest.raises(UserError, match=r"`labels` must have a label for each of 4 rows, got shape \[2\] in .*y\.npy"):
        open_rows(tmp_path / "a.npy", labels=tmp_path / "y.npy")
