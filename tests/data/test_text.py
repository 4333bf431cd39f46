"""Text as token ids."""

import gzip
import lzma

import pytest
import torch

from manyclass.data import encode, read_text, standard_library
from manyclass.errors import UserError


def test_ids_go_from_frequent_to_rare_and_ties_by_name():
    text = encode(["b", "a", "b", "c", "a", "b"], ["a"])
    assert text.vocabulary == ("b", "a", "c")
    assert text.train.tolist() == [0, 1, 0, 2, 1, 0]


def test_rare_and_new_tokens_are_unknown():
    text = encode(["a", "a", "b", "c"], ["a", "b", "d"], min_count=2)
    assert text.vocabulary == ("<unk>", "a")
    assert text.held_out.tolist() == [1, 0, 0]


@pytest.mark.parametrize("min_count", [1, 2, 3])
def test_a_text_with_the_unknown_token_keeps_one(min_count):
    text = encode(["a", "<unk>", "a", "b", "b"], ["z", "<unk>"], min_count=min_count)
    assert text.vocabulary.count("<unk>") == 1
    unknown = text.vocabulary.index("<unk>")
    assert text.held_out.tolist() == [unknown, unknown]
    assert all(0 <= i < text.num_classes for i in text.train.tolist())


def test_without_unknown_tokens_there_is_no_class_for_them():
    assert encode(["a", "b"], ["a"]).vocabulary == ("a", "b")


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".bz2"])
def test_files_are_read_compressed_or_not(tmp_path, ending):
    import bz2

    opener = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}[ending]
    for name, content in (("train", "\ufeffa b\r\nb\n"), ("valid", "b a\n")):
        with opener(tmp_path / f"{name}.txt{ending}", "wt", encoding="utf-8", newline="") as file:
            file.write(content)
    text = read_text(tmp_path)
    assert [text.vocabulary[i] for i in text.train] == ["a", "b", "<eos>", "b", "<eos>"]
    assert [text.vocabulary[i] for i in text.held_out] == ["b", "a", "<eos>"]


def test_words_are_runs_of_letters_and_single_marks(tmp_path):
    (tmp_path / "train.txt").write_text("Nem, az ő’k d'or!\n", encoding="utf-8")
    (tmp_path / "test.txt").write_text("az az\n", encoding="utf-8")
    text = read_text(tmp_path, split="words")
    assert [text.vocabulary[i] for i in text.train] == ["Nem", ",", "az", "ő’k", "d'or", "!", "<eos>"]


def test_a_single_file_holds_out_every_twentieth_hundred_lines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line{i}\n" for i in range(4000)))
    text = read_text(path, min_count=1)
    assert len(text.held_out) == 2 * 200
    assert len(text.train) == 2 * 3800
    other = tmp_path / "other.txt"
    other.write_text("line0 line1\n")
    assert read_text(path, held_out=other).held_out.numel() == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold more than 0 tokens"),
        (b"a b\n\xff\xfe c\n", "must be UTF-8, got byte 0xff"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, message):
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    (tmp_path / "valid.txt").write_text("a b\n")
    with pytest.raises(UserError, match=message):
        read_text(tmp_path)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"a folder with train\.txt, got .*, which has none"):
        read_text(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_text(tmp_path / "none.txt")
    broken = tmp_path / "text.xz"
    broken.write_bytes(b"no xz at all")
    with pytest.raises(UserError, match="must be a file that can be read"):
        read_text(broken)
    cut = tmp_path / "text.gz"
    cut.write_bytes(gzip.compress(b"a b c\n" * 1000)[:-20])
    with pytest.raises(UserError, match="must be a file that can be read"):
        read_text(cut)


def test_ids_may_be_kept_in_a_folder(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line{i % 50} of a text\n" for i in range(4000)))
    held, kept = read_text(path, min_count=2), read_text(path, min_count=2, folder=tmp_path / "ids")
    assert torch.equal(kept.train, held.train)
    assert torch.equal(kept.held_out, held.held_out)
    assert kept.vocabulary == held.vocabulary
    assert (tmp_path / "ids" / "train.bin").stat().st_size == 8 * len(held.train)
    kept.train[0] = 3
    assert torch.equal(read_text(path, min_count=2, folder=tmp_path / "ids").train, held.train)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a b\n" * 2000)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="`folder` must be one that can be written to"):
        read_text(tmp_path / "a.txt", folder=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "no folder"


def test_reading_a_file_equals_encoding_its_tokens(tmp_path):
    content = [f"w{i * i % 37} w{i % 5} <unk>" for i in range(3000)]
    (tmp_path / "a.txt").write_text("\n".join(content))
    tokens = [[*line.split(), "<eos>"] for line in content]
    parts = ([], [])
    for i, line in enumerate(tokens):
        parts[i // 100 % 20 == 10].extend(line)
    for min_count in (1, 40):
        found, expected = read_text(tmp_path / "a.txt", min_count=min_count), encode(*parts, min_count=min_count)
        assert found.vocabulary == expected.vocabulary
        assert torch.equal(found.train, expected.train)
        assert torch.equal(found.held_out, expected.held_out)


@pytest.mark.parametrize("later", ["a b\nnew b\n", "a b\n", "a b\na b c\n"])
def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, later):
    found = iter([["a b", "a b"], ["a b"], later.splitlines(), ["a b"]])
    monkeypatch.setattr("manyclass.data.text.lines", lambda path, name, progress: iter(next(found)))
    with pytest.raises(UserError, match="must stay as it is while it is read"):
        read_text(tmp_path / "a.txt", held_out=tmp_path / "b.txt")


def test_the_standard_library_is_a_text():
    text = standard_library(files=60)
    assert text.num_classes > 1000
    assert torch.bincount(text.train, minlength=text.num_classes).min() >= 1
    assert "60 files of Python" in text.source
    assert {"def", "return", "<unk>"} <= set(text.vocabulary)


def test_a_part_of_a_short_text_is_held_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"a w{i}\n" for i in range(60)))
    text = read_text(path)
    # Runs of three lines, of which the eleventh is held out.
    assert [text.vocabulary[i] for i in text.held_out.tolist()] == [
        token for i in (30, 31, 32) for token in ("a", "<unk>", "<eos>")
    ]
    path.write_text("a b\n" * 5)
    with pytest.raises(UserError, match="one line in 20 is held out: give a longer file, or `held_out`"):
        read_text(path)


def test_some_token_must_be_frequent_enough(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a a b\n" * 60)
    assert "a" in read_text(path, min_count=100).vocabulary
    with pytest.raises(
        UserError, match="`min_count` must leave a token to predict, got 1000, and no token occurs more often"
    ):
        read_text(path, min_count=1000)


def test_progress_is_reported(tmp_path):
    path, seen = tmp_path / "a.txt", []
    path.write_text("a b\n" * 60)
    read_text(path, progress=lambda done, size: seen.append((done, size)))
    assert seen
    assert set(seen) == {(240, 240)}
