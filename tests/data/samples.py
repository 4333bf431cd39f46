"""A small file of rows in each format, as bytes."""

import bz2
import gzip
import io
import lzma

import numpy as np


def _saved(save, *arrays, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def _rows():
    draw = np.random.default_rng(0)
    return draw.normal(size=(40, 5)).astype(np.float32).round(3), draw.integers(0, 4, 40)


def svmlight(*, header=False):
    lines = ["40 5 4"] if header else []
    for row, label in zip(*_rows(), strict=True):
        lines.append(f"{label} " + " ".join(f"{i}:{value:g}" for i, value in enumerate(row)))
    return "\n".join([*lines, ""]).encode()


def table(delimiter=","):
    lines = [delimiter.join(("one", "two", "says", "label"))]
    for i, (row, label) in enumerate(zip(*_rows(), strict=True)):
        lines.append(delimiter.join((str(row[0]), str(row[1]), f'"word{label} said, ""{i}"""', f"c{label}")))
    return "\n".join([*lines, ""]).encode()


def parquet():
    import pyarrow
    import pyarrow.parquet

    x, y = _rows()
    columns = {"one": x[:, 0], "two": x[:, 1], "says": [f"word{i}" for i in y], "label": y}
    return _saved(lambda file: pyarrow.parquet.write_table(pyarrow.table(columns), file))


def npz(*, compressed=False):
    x, y = _rows()
    return _saved(np.savez_compressed if compressed else np.savez, X=x, y=y)


def sparse_npz():
    from scipy.sparse import csr_array

    x, y = _rows()
    matrix = csr_array(np.where(x > 0, x, 0))
    parts = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}
    return _saved(np.savez, **parts, format=b"csr", y=np.array([f"c{i}" for i in y]))


def npy():
    return _saved(np.save, _rows()[0])


def labels():
    return _saved(np.save, _rows()[1])


SAMPLES = {
    "a.svm": svmlight,
    "header.svm": lambda: svmlight(header=True),
    "a.svm.gz": lambda: gzip.compress(svmlight(), mtime=0),
    "a.svm.xz": lambda: lzma.compress(svmlight()),
    "a.svm.bz2": lambda: bz2.compress(svmlight()),
    "a.csv": table,
    "a.tsv": lambda: table("\t"),
    "a.parquet": parquet,
    "a.npz": npz,
    "compressed.npz": lambda: npz(compressed=True),
    "sparse.npz": sparse_npz,
    "a.npy": npy,
}
