"""The benchmark of sentence embeddings runs at a small scale."""

import csv
import lzma
import math
import sys

import pytest
from benchmarks import sentence_pairs

ARTICLE = """
 = Owl =

 The owl sits in the tree . Its eyes are large and yellow today .

 = = History = =

 The first owl was seen in the north . Later another one came from the <unk> . Very few .

 = = <unk> calls = =

 The owl calls at night in the forest .

 = = = Food = = =

 It eats the mice that run in the field and then many more of them """


@pytest.fixture
def small(tmp_path, monkeypatch):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for part, copies in (("train", 12), ("test", 2)):
        with lzma.open(folder / f"{part}.txt.xz", "wt", encoding="utf-8") as file:
            file.write(f"{ARTICLE}{'and more ' * 20}.\n" * copies)
    monkeypatch.setattr(sentence_pairs, "DATA", tmp_path)
    sentence_pairs.numbered.cache_clear()
    yield
    sentence_pairs.numbered.cache_clear()


def test_sentences_belong_to_the_heading_above_them(small):
    found = sentence_pairs.headings("test")
    assert found[0] == ("The first owl was seen in the north .", "History")
    assert found[1] == ("Later another one came from the <unk> .", "History")
    assert {heading for _, heading in found} == {"History", "Food"}
    assert max(len(sentence.split()) for sentence, _ in found) == sentence_pairs.MOST_WORDS


def test_a_word_is_left_out_of_its_sentence(small):
    for rest, word in sentence_pairs.words("test"):
        assert word.isalpha()
        assert word not in ("", "<unk>")
        assert len(rest.split()) >= sentence_pairs.LEAST_WORDS - 1


def test_neighbours_are_in_one_paragraph_and_no_positive_occurs_twice(small):
    found = sentence_pairs.neighbours("train")
    assert ("The owl sits in the tree .", "Its eyes are large and yellow today .") in found
    assert len({positive for _, positive in found}) == len(found) == 2


def test_a_run_gives_rows_and_a_plot(small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "pairs.csv"
    monkeypatch.setattr(sys, "argv", ["sentence_pairs", "--steps", "3", "--seeds", "1", "--out", str(out)])
    sentence_pairs.main()
    with out.open() as file:
        rows = list(csv.DictReader(file))
    kinds = {(row["pairs"], row["loss"], row["log_f_added"]) for row in rows}
    assert kinds == {
        *((pairs, loss, "0") for pairs in sentence_pairs.PAIRS for loss in ("corrected", "uncorrected")),
        ("headings", "none", "1"),
        ("words", "none", "1"),
        ("headings", "uncorrected", "1"),
        ("words", "uncorrected", "1"),
    }
    # Two in three pairs have the first of two headings, in training and held out: the loss is the entropy.
    (row,) = [row for row in rows if (row["pairs"], row["loss"], row["positives"]) == ("headings", "none", "all")]
    assert float(row["nll"]) == pytest.approx(math.log(3) - 2 / 3 * math.log(2), abs=1e-4)
    for row in rows:
        assert 0 <= float(row["recall_at_10"]) <= 1
        assert float(row["nll"]) > 0
        assert row["torch"]
    assert {"all", "10-99"} <= {row["positives"] for row in rows if row["pairs"] == "headings"}
    assert out.with_suffix(".png").stat().st_size > 1000
    assert out.with_suffix(".svg").exists()
    assert "recall@10" in capsys.readouterr().out
