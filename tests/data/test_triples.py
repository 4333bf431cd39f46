"""Triples of a knowledge graph, and their known tails."""

import gzip
import lzma

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyclass.data.triples import KnownTails, Triples, read_triples
from manyclass.errors import UserError

TRAIN = "anna\tknows\tbert\nanna\tknows\tcarl\nbert\tlikes\tanna\n"
VALID = "anna\tknows\tdora\n"
TEST = "carl\tlikes\tanna\n"


@pytest.fixture
def folder(tmp_path):
    for name, text in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def names(data, triples):
    return [(data.entities[h], data.relations[r], data.entities[t]) for h, r, t in triples.tolist()]


def test_ids_stand_for_the_names_in_the_files(folder):
    data = read_triples(folder)
    assert names(data, data.train) == [tuple(line.split("\t")) for line in TRAIN.splitlines()]
    assert names(data, data.valid) == [("anna", "knows", "dora")]
    assert names(data, data.test) == [("carl", "likes", "anna")]


def test_ids_go_from_frequent_to_rare_and_then_by_name(folder):
    data = read_triples(folder)
    assert data.entities == ("anna", "bert", "carl", "dora")
    assert data.relations == ("knows", "likes")


def test_an_entity_of_valid_or_test_alone_is_a_class(folder):
    data = read_triples(folder)
    assert data.num_entities == 4
    assert data.entities.index("dora") not in data.train[:, [0, 2]]


@pytest.mark.parametrize(("ending", "opened"), [("gz", gzip.open), ("xz", lzma.open)])
def test_compressed_files_are_decompressed(folder, tmp_path, ending, opened):
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in ("train", "valid", "test"):
        with opened(packed / f"{name}.txt.{ending}", "wt", encoding="utf-8") as file:
            file.write((folder / f"{name}.txt").read_text())
    assert torch.equal(read_triples(packed).train, read_triples(folder).train)


def test_files_may_be_given_one_by_one(folder):
    data = read_triples(folder / "train.txt", test=folder / "test.txt")
    assert len(data.train) == 3
    assert data.valid.shape == (0, 3)
    assert len(data.test) == 1


def test_a_given_file_replaces_that_of_the_folder(folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("emil\tlikes\tanna\n")
    data = read_triples(folder, test=other)
    assert names(data, data.test) == [("emil", "likes", "anna")]
    assert len(data.valid) == 1


def test_reciprocals_have_the_head_as_tail(folder):
    data = read_triples(folder)
    both = data.both_ways(data.train)
    assert torch.equal(both[:3], data.train)
    assert torch.equal(both[3:], data.train[:, [2, 1, 0]] + torch.tensor([0, 2, 0]))


def test_the_known_tails_of_training_are_those_of_training_alone(folder):
    data = read_triples(folder)
    anna, bert, carl, dora = (data.entities.index(name) for name in ("anna", "bert", "carl", "dora"))
    knows = data.relations.index("knows")
    wanted = torch.tensor([[anna, knows, bert]])
    assert data.known("train").others(wanted).sort().values.tolist() == [[-1, carl]]
    assert data.known("train", "valid", "test").others(wanted).sort().values.tolist() == [[-1, carl, dora]]


TRIPLE = st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 5))


@given(st.lists(TRIPLE, min_size=1, max_size=30), st.lists(TRIPLE, min_size=1, max_size=10))
def test_others_are_all_other_known_tails(known, wanted):
    tails = KnownTails.of(torch.tensor(known), num_relations=3)
    others = tails.others(torch.tensor(wanted))
    expected = [{t for h, r, t in known if (h, r) == (head, relation)} for head, relation, _ in wanted]
    assert [{t for t in row if t >= 0} for row in others.tolist()] == [
        each - {tail} for each, (_, _, tail) in zip(expected, wanted, strict=True)
    ]
    assert tails.number(torch.tensor(wanted)).tolist() == [len(each) for each in expected]
    assert others.shape[1] == max(len(each) for each in expected)


def test_a_given_width_pads_and_never_cuts():
    tails = KnownTails.of(torch.tensor([[0, 0, 1], [0, 0, 2], [1, 0, 2]]), num_relations=1)
    wanted = torch.tensor([[0, 0, 1]])
    assert tails.others(wanted, width=4).tolist() == [[-1, 2, -1, -1]]
    with pytest.raises(ValueError, match="`width` must be at least 2, got 1"):
        tails.others(wanted, width=1)


@pytest.mark.parametrize("shape", [(0, 3), (2, 2), (3,)])
def test_known_tails_need_triples(shape):
    with pytest.raises(ValueError, match=r"`triples` must have shape \[N, 3\]"):
        KnownTails.of(torch.zeros(shape, dtype=torch.int64), num_relations=1)


def test_an_unknown_split_is_refused():
    data = Triples(*torch.zeros(3, 1, 3, dtype=torch.int64), ("a",), ("r",))
    with pytest.raises(ValueError, match="`splits` must be one of"):
        data.known("training")


@pytest.mark.parametrize("line", ["anna\tknows", "anna\tknows\tbert\tcarl", "anna\t\tbert", "anna knows bert"])
def test_a_line_that_is_no_triple_is_named(folder, line):
    (folder / "valid.txt").write_text(f"{VALID}{line}\n")
    with pytest.raises(UserError, match=r"head TAB relation TAB tail in each line, got .* in line 2 of .*valid\.txt"):
        read_triples(folder)


def test_blank_lines_are_ignored(folder):
    before = read_triples(folder)
    (folder / "valid.txt").write_text(f"\n{VALID}\n")
    assert torch.equal(read_triples(folder).valid, before.valid)


def test_bytes_that_are_no_text_are_refused(folder):
    (folder / "train.txt").write_bytes(b"anna\tknows\t\xff\n")
    with pytest.raises(UserError, match=r"UTF-8, got byte 0xff .*train\.txt"):
        read_triples(folder)


def test_a_folder_without_triples_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a folder with train\.txt"):
        read_triples(tmp_path)
    with pytest.raises(UserError, match="a file that can be read"):
        read_triples(tmp_path / "missing.txt")


def test_an_empty_training_file_is_refused(folder):
    (folder / "train.txt").write_text("")
    with pytest.raises(UserError, match="a triple to train on, got none"):
        read_triples(folder)
