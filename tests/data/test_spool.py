"""Rows of a file as memory-mapped files."""

import os
import resource
import signal

import numpy as np
import pytest
from scipy.sparse import csr_array

from manyclass.data import Chunk, Names, RowBatches, Schema, open_rows, open_spool, spool
from manyclass.errors import UserError
from tests.data import samples


@pytest.fixture
def write(tmp_path):
    def write(content, name="a.svm"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return open_rows(tmp_path / name)

    return write


def test_sparse_rows_and_their_labels_are_mapped(write, tmp_path):
    names = Names()
    rows = spool(write("b 1:1 3:2\na\nb 2:5\n"), tmp_path / "rows", names=names)
    assert rows.features.toarray().tolist() == [[1, 0, 2], [0, 0, 0], [0, 5, 0]]
    assert rows.labels.tolist() == [0, 1, 0]
    assert rows.starts is None
    assert list(names) == ["b", "a"]
    for array in (rows.features.data, rows.features.indices, rows.features.indptr, rows.labels):
        assert isinstance(array, np.memmap)
    assert rows.features.indices.dtype == rows.features.indptr.dtype == np.int32


def test_rows_of_several_labels_have_starts(write, tmp_path):
    rows = spool(write("b,a 1:1\n 1:2\nc 1:3\n"), tmp_path / "rows", names=Names())
    assert rows.labels.tolist() == [0, 1, 2]
    assert rows.starts.tolist() == [0, 2, 2, 3]


def test_dense_rows_are_mapped(write, tmp_path):
    reader = write(samples.npz(), "a.npz")
    rows = spool(reader, tmp_path / "rows", names=Names())
    assert isinstance(rows.features, np.memmap)
    assert np.array_equal(rows.features, next(reader.chunks()).features)


def test_known_labels_keep_their_ids(write, tmp_path):
    names = Names(["x", "a"])
    assert spool(write("b 1:1\na 1:1\n"), tmp_path / "rows", names=names).labels.tolist() == [2, 1]


def test_rows_are_opened_again(write, tmp_path):
    rows = spool(write("b,a 1:1\nc 2:1\n"), tmp_path / "rows", names=Names())
    again = open_spool(tmp_path / "rows")
    assert again.labels.tolist() == rows.labels.tolist()
    assert np.array_equal(again.features.toarray(), rows.features.toarray())
    assert np.array_equal(again.starts, rows.starts)


def test_new_rows_replace_old_ones(write, tmp_path):
    spool(write("b,a 1:1\nc 2:1\n"), tmp_path / "rows", names=Names())
    spool(write(samples.npz(), "a.npz"), tmp_path / "rows", names=Names())
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == ["features.bin", "labels.bin", "rows.json"]


def test_progress_ends_at_the_size_of_the_file(write, tmp_path):
    seen = []
    reader = write(samples.svmlight())
    spool(reader, tmp_path / "rows", names=Names(), progress=lambda *at: seen.append(at))
    assert seen[-1] == (reader.size, reader.size)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("a 1:1\na 2:1\n", "a.svm", "must have at least two classes, got only 'a' in"),
        (" 1:1\n 2:1\n", "a.svm", "must have at least two classes, got no label in"),
        (samples.npy(), "a.npy", "must have labels to learn from, got none in"),
        ("a 1:1\nb 1:x\n", "a.svm", "index:value, got '1:x' in line 2 of"),
    ],
)
def test_rows_without_classes_to_learn_are_refused_and_leave_nothing(write, tmp_path, content, name, message):
    with pytest.raises(UserError, match=message):
        spool(write(content, name), tmp_path / "rows", names=Names())
    assert not list((tmp_path / "rows").glob("*"))


class RandomRows:
    """A reader of random rows."""

    labelled, size = True, 1
    schema = Schema("svmlight", 1000, sparse=True)

    def __init__(self, path, chunks, rows=1000):
        self.path, self._chunks, self._rows = path, chunks, rows

    def chunks(self):
        draw = np.random.default_rng(0)
        for _ in range(self._chunks):
            columns = draw.integers(0, 1000, self._rows * 20).astype(np.int32)
            starts = np.arange(0, self._rows * 20 + 1, 20)
            matrix = csr_array((np.ones(len(columns), np.float32), columns, starts), shape=(self._rows, 1000))
            yield Chunk(matrix, [(str(i),) for i in draw.integers(0, 50, self._rows)], 1)


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path):
    # A limit on file size stands in for a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"The disk of .*rows is full: free some of it"):
            spool(RandomRows(tmp_path, 50), tmp_path / "rows", names=Names())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list((tmp_path / "rows").iterdir())


def anonymous():
    """Return the anonymous memory of this process in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@pytest.mark.machine
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="this machine has no /proc")
def test_memory_does_not_grow_with_the_rows(tmp_path):
    spool(RandomRows(tmp_path, 2), tmp_path / "rows", names=Names())
    before = anonymous()
    rows = spool(RandomRows(tmp_path, 200), tmp_path / "rows", names=Names())
    for _ in zip(range(100), RowBatches(rows, 256, seed=0), strict=False):
        pass
    size = sum(path.stat().st_size for path in (tmp_path / "rows").iterdir())
    assert size > 30 << 20
    assert anonymous() - before < size / 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "rows.json").unlink(), "must hold rows, got .*: No such file"),
        (lambda folder: (folder / "rows.json").write_text("{"), r"must hold rows, got .*rows\.json"),
        (lambda folder: (folder / "rows.json").write_text('{"format": 9}'), "format 9, 1 is known"),
        (lambda folder: (folder / "rows.json").write_text("[]"), r"must hold rows, got .*rows\.json"),
        (lambda folder: (folder / "values.bin").write_bytes(b"1"), r"must hold 8 bytes in .*values\.bin, got 1"),
        (lambda folder: (folder / "labels.bin").unlink(), r"must hold rows, got .*labels\.bin: No such file"),
    ],
)
def test_damaged_rows_are_refused(write, tmp_path, damage, message):
    spool(write("b 1:1\nc 2:1\n"), tmp_path / "rows", names=Names())
    damage(tmp_path / "rows")
    with pytest.raises(UserError, match=message):
        open_spool(tmp_path / "rows")
