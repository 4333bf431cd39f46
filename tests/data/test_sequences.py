"""Interactions of users in the order of time."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyclass.data import Names, SequenceBatches, Sequences, read_sequences
from manyclass.errors import UserError

BEAUTY = Path(__file__).parents[3] / "shared" / "data" / "amazon-beauty" / "beauty.txt.xz"

LINES = "u a\nv b\nu b\nu c\nv a\nu b\nw b\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(LINES)
    return path


def items(sequences, user):
    begin, end = sequences.starts[user : user + 2].tolist()
    return [sequences.item_names[i] for i in sequences.items[begin:end].tolist()]


def made(lists):
    flat = [item for row in lists for item in row]
    starts = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Sequences(torch.tensor(flat), starts, Names(map(str, range(100))), Names(map(str, range(len(lists)))))


def test_items_of_a_user_keep_their_order(path):
    sequences = read_sequences(path)
    assert list(sequences.user_names) == ["u", "v", "w"]
    assert [items(sequences, user) for user in range(3)] == [["a", "b", "c", "b"], ["b", "a"], ["b"]]
    assert (sequences.num_users, sequences.num_items) == (3, 3)


def test_ids_of_items_go_from_frequent_to_rare_and_then_by_name(path):
    assert list(read_sequences(path).item_names) == ["b", "a", "c"]


def test_the_last_two_items_of_a_user_of_three_or_more_are_held_out():
    sequences = made([[1, 2, 3, 4], [5, 6], [7, 8, 9]])
    assert sequences.counts().nonzero().flatten().tolist() == [1, 2, 5, 6, 7]
    assert sequences.counts().sum() == 5


def test_without_held_back_items_all_are_trained_on_and_every_pair_is_a_test():
    sequences = replace(made([[1, 2, 3, 4], [5, 6], [7], [7, 8, 9]]), held_back=False)
    assert sequences.counts().sum() == 10
    batches = sequences.last_batches("test", 8, length=9)
    assert batches.users.tolist() == [0, 1, 3]
    ((inputs, _, target, _),) = batches
    assert (inputs.tolist(), target.tolist()) == ([[1, 2, 3], [5, 0, 0], [7, 8, 0]], [4, 6, 9])
    assert sum((target >= 0).sum().item() for _, target in SequenceBatches(sequences, 8, length=9)) == 6


def test_a_digest_tells_the_same_items_of_the_same_users():
    one = made([[1, 2, 3], [4, 5]]).digest()
    assert one == made([[1, 2, 3], [4, 5]]).digest()
    assert len({one, made([[1, 2, 3, 4], [5]]).digest(), made([[1, 2, 3], [5, 4]]).digest()}) == 3


@pytest.mark.parametrize("split", ["valid", "test", "next"])
def test_the_target_comes_after_the_input(split):
    sequences = made([[1, 2, 3, 4], [5, 6], [7, 8, 9]])
    ((inputs, lengths, target, seen),) = sequences.last_batches(split, 8, length=2)
    expected = {
        "valid": ([[1, 2], [7, 0]], [2, 1], [3, 8], [[1, 2], [7, -1]]),
        "test": ([[2, 3], [7, 8]], [2, 2], [4, 9], [[1, 2, 3], [7, 8, -1]]),
        "next": ([[3, 4], [5, 6], [8, 9]], [2, 2, 2], [-100] * 3, [[1, 2, 3, 4], [5, 6, -1, -1], [7, 8, 9, -1]]),
    }[split]
    assert (inputs.tolist(), lengths.tolist(), target.tolist(), seen.tolist()) == expected


def test_a_target_seen_before_is_not_excluded():
    ((_, _, target, seen),) = made([[1, 2, 1]]).last_batches("test", 8, length=5)
    assert target.tolist() == [1]
    assert seen.tolist() == [[-1, 2]]


def test_batches_can_be_iterated_again_and_list_their_users():
    batches = made([[1, 2, 3], [4, 5], [6, 7, 8], [1, 2, 3]]).last_batches("test", 2, length=5)
    assert len(batches) == len(list(batches)) == len(list(batches)) == 2
    assert batches.users.tolist() == [0, 2, 3]


def test_each_item_is_the_target_of_those_before_it():
    ((inputs, target),) = SequenceBatches(made([[1, 2, 3, 4, 5], [6, 7], [8]]), 8, length=9)
    assert inputs.tolist() == [[1, 2], [6, 0]]
    assert target.tolist() == [[2, 3], [7, -100]]


@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1), st.integers(1, 5), st.integers(1, 4)
)
def test_every_training_step_occurs_once(lists, length, size):
    sequences = made(lists)
    batches = SequenceBatches(sequences, size, length=length, seed=0)
    found = []
    for inputs, target in batches:
        assert inputs.shape == target.shape
        assert inputs.shape[1] <= length
        real = target != -100
        assert (inputs[~real] == 0).all()
        found += list(zip(inputs[real].tolist(), target[real].tolist(), strict=True))
    kept = [row if len(row) < 3 else row[:-2] for row in lists]
    assert sorted(found) == sorted(pair for row in kept for pair in itertools.pairwise(row))
    assert len(batches) == len(list(batches))


def test_pieces_follow_each_other_and_the_last_is_full():
    batches = SequenceBatches(made([[1, 2, 3, 4, 5, 6, 0, 0]]), 8, length=2)
    assert sorted(map(tuple, next(iter(batches))[0].tolist())) == [(1, 0), (2, 3), (4, 5)]


def test_the_epoch_determines_the_order():
    batches = SequenceBatches(made([[i, i + 1] for i in range(60)]), 4, length=5, seed=1)

    def order(epoch):
        batches.set_epoch(epoch)
        return [inputs.flatten().tolist() for inputs, _ in batches]

    first, second = order(0), order(1)
    assert first != second
    assert order(0) == first


def test_lines_of_items_unknown_to_a_model_are_left_out(path):
    sequences = read_sequences(path, item_names=Names(["c", "b"]))
    assert [items(sequences, user) for user in range(3)] == [["b", "c", "b"], ["b"], ["b"]]
    assert list(sequences.item_names) == ["c", "b"]
    assert sequences.unknown == 2
    assert sequences.left_out.tolist() == [1, 1, 0]
    path.write_text("u a\nv b\n")
    sequences = read_sequences(path, item_names=Names(["c", "b"]))
    assert list(sequences.user_names) == ["u", "v"]
    assert sequences.last_batches("next", 8, length=5).users.tolist() == [1]
    assert len(SequenceBatches(sequences, 8, length=5)) == 0
    with pytest.raises(UserError, match="of 2 lines none has an item that the model knows"):
        read_sequences(path, item_names=Names(["x", "y"]))


@pytest.mark.parametrize("line", ["u", "u a 3", "u\ta\t3", "u\t", "\ta"])
def test_a_line_of_another_form_is_named(path, line):
    path.write_text(f"u a\n{line}\nu b\n")
    with pytest.raises(UserError, match=r"must hold user and item in each line, got .* in line 2 of .*a\.txt"):
        read_sequences(path)


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_blank_lines_are_ignored(path, blank):
    path.write_text(f"u a\n{blank}\nu b\n{blank}\n")
    assert items(read_sequences(path), 0) == ["a", "b"]


def test_tabs_keep_spaces_within_names_and_none_around_them(path):
    path.write_text("some one\tan item \nsome one\tb\n")
    sequences = read_sequences(path)
    assert list(sequences.user_names) == ["some one"]
    assert set(sequences.item_names) == {"an item", "b"}


def test_too_little_data_is_refused(path):
    path.write_text("")
    with pytest.raises(UserError, match="must hold lines of user and item, got none in"):
        read_sequences(path)
    path.write_text("u a\nv a\n")
    with pytest.raises(UserError, match="at least two items, got only 'a' in"):
        read_sequences(path)
    path.write_text(f"u {'a' * 1001}\n")
    with pytest.raises(UserError, match="at most 1,000 characters, got one of 1,001 in line 1 of"):
        read_sequences(path)


@pytest.mark.skipif(not BEAUTY.exists(), reason="the data is not on this machine")
def test_all_interactions_of_a_real_file_are_read():
    sequences = read_sequences(BEAUTY)
    assert (len(sequences.items), sequences.num_users, sequences.num_items) == (353_962, 40_226, 54_542)
    assert sum(len(target) for _, _, target, _ in sequences.last_batches("test", 4096, length=50)) == 40_226
    assert sequences.counts().sum() == 353_962 - 2 * 40_226
