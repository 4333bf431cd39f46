"""Files of rows in all formats, intact and broken."""

import numpy as np
import pytest

from manyclass.data import Names, Schema, open_rows, open_spool, read_sequences, read_text, spool
from manyclass.data.triples import read_triples
from manyclass.errors import UserError
from tests.corruptions import corruptions
from tests.data import samples


@pytest.fixture
def options(tmp_path):
    """Return the options that a file needs besides its name."""
    (tmp_path / "labels.npy").write_bytes(samples.labels())

    def options(name):
        return {"labels": tmp_path / "labels.npy"} if name.endswith(".npy") else {}

    return options


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_every_format_is_known_by_its_ending(tmp_path, name, options):
    path = tmp_path / name
    path.write_bytes(samples.SAMPLES[name]())
    reader = open_rows(path, **options(name))
    chunks = list(reader.chunks())
    assert sum(map(len, chunks)) == 40
    assert {label.lstrip("c") for chunk in chunks for (label,) in chunk.labels} == {"0", "1", "2", "3"}
    assert all(chunk.features.shape[1] == reader.schema.num_features for chunk in chunks)
    assert all(chunk.features.dtype == np.float32 for chunk in chunks)
    assert Schema.from_json(reader.schema.to_json()) == reader.schema
    assert chunks[-1].done == reader.size


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_the_same_file_gives_the_same_rows_by_its_schema(tmp_path, name, options):
    path = tmp_path / name
    path.write_bytes(samples.SAMPLES[name]())
    first = open_rows(path, **options(name))
    chunks = list(first.chunks())
    again = open_rows(path, schema=first.schema, **options(name))
    for one, other in zip(chunks, again.chunks(), strict=True):
        assert one.labels == other.labels
        assert abs(one.features - other.features).max() == 0
    assert again.schema == first.schema


def test_the_format_can_be_given(tmp_path):
    path = tmp_path / "rows.data"
    path.write_bytes(samples.svmlight())
    with pytest.raises(UserError, match=r"a format that ends in one of \.svm, .* got .*rows\.data; or give `format`"):
        open_rows(path)
    assert open_rows(path, format="svmlight").schema.format == "svmlight"
    with pytest.raises(UserError, match=r"`format` must be of a format that is one of svmlight, .* got 'xml'"):
        open_rows(path, format="xml")


def test_an_option_of_another_format_is_refused(tmp_path):
    path = tmp_path / "a.svm"
    path.write_bytes(samples.svmlight())
    with pytest.raises(UserError, match="`label` must be left out except for csv, tsv, parquet, got y for"):
        open_rows(path, label="y")
    with pytest.raises(UserError, match="`labels` must be left out except for npy, npz"):
        open_rows(path, labels=path)


def test_a_model_of_a_table_needs_a_table(tmp_path):
    for name in ("a.svm", "a.csv", "a.npz"):
        (tmp_path / name).write_bytes(samples.SAMPLES[name]())
    table, matrix = (open_rows(tmp_path / name).schema for name in ("a.csv", "a.svm"))
    with pytest.raises(
        UserError, match=r"must be a table \(CSV, TSV or Parquet\), as the model's was \(csv\), got svm"
    ):
        open_rows(tmp_path / "a.svm", schema=table)
    with pytest.raises(UserError, match=r"must be a table .* got npz"):
        open_rows(tmp_path / "a.npz", schema=table)
    with pytest.raises(UserError, match=r"must be rows of numbers .* got csv"):
        open_rows(tmp_path / "a.csv", schema=matrix)


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_missing_files_and_folders_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="No such file or directory"):
        open_rows(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="must be a file, got the folder"):
        open_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["a.npy.gz", "a.parquet.xz"])
def test_compressed_binary_files_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="must not be compressed a second time"):
        open_rows(tmp_path / name)


def refusal(read):
    """Return the message of the error; None: the file is read."""
    try:
        read()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_a_broken_file_is_read_or_refused_in_one_line(tmp_path, name, options):
    path = tmp_path / name
    refused = 0
    for i, content in enumerate(corruptions(samples.SAMPLES[name](), 100, seed=7)):
        path.write_bytes(content)
        folder = tmp_path / f"rows{i}"
        message = refusal(lambda folder=folder: spool(open_rows(path, **options(name)), folder, names=Names()))
        if message is None:
            assert len(open_spool(folder))
        else:
            refused += 1
            assert "\n" not in message
            assert str(tmp_path) in message
            assert not list(folder.glob("*"))
    assert refused > 20


def graph(path):
    return read_triples(path.parent)


@pytest.mark.parametrize(
    ("name", "read", "content"),
    [
        ("train.txt", graph, "".join(f"a{i % 7}\tr{i % 3}\tb{i % 5}\n" for i in range(60))),
        ("text.txt", read_text, "".join(f"some words {i % 9}, é\n" for i in range(1200))),
        ("sequences.txt", read_sequences, "".join(f"u{i % 7} i{i % 11}\n" for i in range(60))),
    ],
)
def test_other_broken_files_are_read_or_refused_in_one_line(tmp_path, name, read, content):
    messages = []
    for broken in corruptions(content.encode(), 100, seed=7):
        (tmp_path / name).write_bytes(broken)
        messages.append(refusal(lambda: read(tmp_path / name)))
    assert len(set(messages)) > 5
    assert not any("\n" in message for message in messages if message)
