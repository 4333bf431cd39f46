"""Benchmarks of designs, at a small scale: real data, the frontier, planted problems."""

import csv
import lzma
import math
import random

import pytest
import torch
from benchmarks import designs, frontier, planted, real_data, tailored
from torch import nn

from manyclass import ClassHead, diagnose
from manyclass.samplers import Exhaustive, Systematic

ITEMS = 1200


def sessions(number, *, first=0, seed=0):
    """Lines of sessions, whose items follow one another in a ring."""
    choose = random.Random(seed)
    lines = []
    for session in range(first, first + number):
        item = choose.randrange(ITEMS)
        for _ in range(choose.randrange(2, 7)):
            lines.append(f"s{session} i{item}\n")
            item = (item + choose.randrange(1, 3)) % ITEMS
    return lines


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sessions").mkdir()
    for part, lines in (("train", sessions(800)), ("test", sessions(50, first=9000, seed=1))):
        with lzma.open(tmp_path / "sessions" / f"tmall-{part}.txt.xz", "wt") as file:
            file.writelines(lines)
    return tmp_path


def place(folder, **options):
    given = {"device": "cpu", "threads": 1, "jobs": 1, "deadline": math.inf} | options
    return designs.Place(folder, folder, **given)


def test_every_twentieth_session_is_for_validation(folder):
    prepared = real_data.DATA_SETS["tmall"](folder, folder)
    train, valid = prepared.source.data.read_text(), prepared.source.held_out.read_text()
    assert sorted((train + valid).splitlines()) == sorted("".join(sessions(800)).splitlines())
    held_out = {line.split()[0] for line in valid.splitlines()}
    assert held_out == {f"s{i}" for i in range(19, 800, 20)}
    assert not held_out & {line.split()[0] for line in train.splitlines()}


def test_a_training_that_was_stopped_is_continued_and_gives_the_same_row(folder):
    setting = designs.RunSettings("tmall", "tailored:200", 0, epochs=1)
    assert designs.run(setting, place(folder, deadline=0.0)) is None
    row = designs.run(setting, place(folder))
    (folder / "other").mkdir()
    whole = designs.run(setting, designs.Place(folder, folder / "other", "cpu", 1, 1, math.inf))
    for name in ("perplexity", "HR@20", "true_error", "steps", "best_epoch", "test_examples"):
        assert row[name] == whole[name]
    assert row["decided"] == "Tailored, k = 200"
    assert 0 < row["true_error"] < 1
    assert 1 < row["perplexity"] < 3 * ITEMS
    path = folder / "designs.csv"
    designs.append(path, row)
    assert designs.run_all([setting], place(folder), path) == 0
    (read,) = designs.read_rows(path)
    assert float(read["MRR"]) == row["MRR"]
    assert "| tailored:200 |" in designs.table([read])


def test_the_true_error_is_that_of_whole_batches():
    torch.manual_seed(0)
    head = ClassHead(8, 500, sampler=Systematic(torch.ones(500), 50))
    nn.init.normal_(head.weight)
    hidden, target = torch.randn(64, 8), torch.randint(500, (64,))
    found = designs.true_error(head, nn.Identity(), [(hidden, target)], draws=200)
    assert found == pytest.approx(diagnose(head, hidden, target, draws=200).rmse_log_z, rel=0.1)
    assert head.training
    exact = ClassHead(8, 500, sampler=Exhaustive(500))
    assert designs.true_error(exact, nn.Identity(), [(hidden, target)]) < 1e-5


def test_the_frontier_of_a_part_of_sessions(folder, monkeypatch):
    monkeypatch.setattr(frontier, "PART_SESSIONS", 400)
    path = folder / "sessions" / "tmall-train.txt.xz"
    kept, number = frontier.read_part(path, 400)
    assert len(kept) == 400
    assert number == len({item for items in kept for item in items})
    out = folder / "frontier.csv"
    names = ["exact", "learned:100", "learned:100+session"]
    for rows in frontier.train_part(path, names, "cpu", None, 2, 2):
        for row in rows:
            designs.append(out, row)
    with out.open() as file:
        curve = [row for row in csv.DictReader(file) if row["design"] == "exact"]
        file.seek(0)
        other = [row for row in csv.DictReader(file) if row["design"] == "learned:100"]
    assert [int(row["step"]) for row in curve] == [1, 2, 3, 4, 5, 6]
    assert float(curve[-1]["epochs"]) == 2
    assert float(other[-1]["seconds"]) >= float(curve[-1]["seconds"])
    assert int(other[-1]["step"]) > 0
    lines = frontier.table(designs.read_rows(out)).splitlines()
    assert [line.split()[1] for line in lines[1:]] == names
    assert lines[1].split()[4] == "1.000"


def test_an_example_includes_its_session_and_what_most_often_follows_the_last_item():
    pairs = [([0], 1), ([0], 2), ([0], 2), ([3, 0], 4), ([2], 5)]
    neighbours = frontier.neighbours_of(pairs, 6)
    assert neighbours[0].tolist() == [2, 1, 4, *[-1] * 5]
    ((before, _, extras),) = frontier.SessionBatches(pairs[3:], 2, seed=None, neighbours=neighbours)
    assert extras["include"][0].tolist() == [*before[0].tolist(), 2, 1, 4, *[-1] * 5]
    assert before[0].tolist()[-2:] == [3, 0]


@pytest.mark.parametrize("name", planted.PROBLEMS)
def test_the_entropy_of_a_planted_problem_is_that_of_its_draws(name):
    problem = planted.PROBLEMS[name](128)
    context, target = problem.draw(1_000_000, torch.Generator().manual_seed(0))
    # Counts of context and class together: their likelihood is a little above that of the law.
    number = torch.bincount(context * 128 + target, minlength=problem.contexts * 128).reshape(-1, 128).double()
    law = number / number.sum(1, keepdim=True).clamp(min=1)
    loss = -(number * law.clamp(min=1e-300).log()).sum() / number.sum()
    biased = (number > 0).sum() / 2 / number.sum()  # of a likelihood that was fitted to its own counts
    assert float(loss + biased) == pytest.approx(problem.entropy, rel=0.05)


def test_planted_problems_show_a_design_that_is_not_accurate():
    problem = planted.PROBLEMS["sharp"](1500)
    exact, shared = (planted.train("sharp", problem, name, steps=40, device="cpu") for name in ("exact", "learned:20"))
    assert exact["true_error"] < 1e-4 < shared["true_error"]
    assert "log Z" in shared["warned"]
    assert not exact["warned"]
    # The probe sees a few examples of each batch, whose error has heavy tails.
    assert 0.5 < shared["probe_error"] / shared["true_error"] < 2
    assert "warned" in planted.shown(shared, [exact, shared])


def test_trained_vectors_are_saved_by_frequency_and_grown(folder, monkeypatch):
    monkeypatch.setattr(tailored, "TRAINED_ON", "tmall")
    base = tailored.train(folder, "cpu", 0.5)
    assert base["w"].shape == (len(base["counts"]), tailored.DIM)
    assert base["counts"].diff().max() <= 0
    assert base["h"].shape == (tailored.BATCH_SIZE, tailored.DIM)
    # Each target occurs in the training set, so in the order of frequency its count is that of an item.
    assert base["counts"][base["t"]].min() >= 1
    assert base["t"].shape == (tailored.BATCH_SIZE,)
    torch.save(base, folder / "vectors.pt")
    own = tailored.trained(folder / "vectors.pt", None, "cpu")
    torch.testing.assert_close(own["w"], base["w"].float())
    more = tailored.trained(folder / "vectors.pt", 3 * ITEMS, "cpu")
    assert len(more["w"]) == len(more["counts"]) == 3 * ITEMS
    torch.testing.assert_close(more["w"][: len(own["w"])], own["w"])
    few = tailored.trained(folder / "vectors.pt", 100, "cpu")
    assert int(few["t"].max()) < 100
    torch.testing.assert_close(few["b"], base["b"][:100])
