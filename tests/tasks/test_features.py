"""Rows of features: several labels per row, unknown labels, and held-out rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from manyclass import tasks
from manyclass.data import Names
from manyclass.errors import UserError
from tests.tasks import problems
from tests.tasks.problems import SETTINGS, fit

TASK = tasks.TASKS["features"]


def write(folder, content, name="rows.svm"):
    path = folder / name
    path.write_text(content)
    return path


def two_labels(folder):
    """Each row has two labels, and both follow from its feature."""
    lines = [f"a{i % 6},b{i % 6} {i % 6 + 1}:1" for i in range(120)]
    return write(folder, "\n".join(lines) + "\n")


def read(folder, data, **options):
    settings = SETTINGS["features"].over(TASK.defaults)
    return TASK.read(tasks.Source(data, **options), settings, folder / "spool")


def test_labels_of_a_row_are_an_example_each_of_weight_one_together(tmp_path):
    task = read(tmp_path, two_labels(tmp_path))
    assert task.spec.counts.sum() == 2 * 114
    for batches in (task.train, task.held_out(None)):
        for _, target, extras in batches:
            assert (extras["weight"] == 0.5).all()
            for own, others in zip(target.tolist(), extras["exclude"].tolist(), strict=True):
                name = task.spec.names[own]
                other = ("b" if name[0] == "a" else "a") + name[1:]
                assert {task.spec.names[i] for i in others if i >= 0} == {other}


def test_labels_of_a_row_are_no_negatives_of_each_other(tmp_path):
    """If they were, the loss could not fall below log 2; with the other label excluded it goes to 0."""
    settings = replace(SETTINGS["features"], epochs=30, learning_rate=1.0)
    done, out = fit("features", tmp_path, data=two_labels(tmp_path), settings=settings)
    assert done.measured.loss < 0.1
    assert done.measured.metrics["accuracy"] == 1.0
    assert done.measured.examples == pytest.approx(6)
    batches, _ = TASK.evaluation_batches(tasks.open_model(out).spec, tasks.Source(tmp_path / "rows.svm"))
    measured = tasks.measure(done.model, batches)
    assert measured.examples == pytest.approx(120)
    assert measured.loss < 0.1


def test_rows_of_unknown_labels_are_left_out_and_counted(trained, tmp_path):
    done, _, _ = trained("features")
    data = write(tmp_path, "w00 1:1\nunicorn 2:1\nw01,unicorn 3:1\n 4:1\nw02,w03 5:1\n")
    batches, _ = TASK.evaluation_batches(done.model.spec, tasks.Source(data))
    measured = tasks.measure(done.model, batches)
    assert measured.examples == pytest.approx(2)
    assert (batches.rows, batches.unknown) == (5, 3)
    targets = [done.model.names[c] for _, target, _ in batches for c in target.tolist()]
    assert targets == ["w00", "w02", "w03"]
    # A second pass does not count them twice.
    assert (batches.rows, batches.unknown) == (5, 3)


def test_only_unknown_labels_are_an_error(trained, tmp_path):
    done, _, _ = trained("features")
    batches, _ = TASK.evaluation_batches(done.model.spec, tasks.Source(write(tmp_path, "unicorn 1:1\n")))
    with pytest.raises(UserError, match="`data` must hold examples of classes that the model knows, got none"):
        tasks.measure(done.model, batches)


def test_features_that_the_model_does_not_have_are_refused(trained, tmp_path):
    done, _, _ = trained("features")
    batches, _ = TASK.evaluation_batches(done.model.spec, tasks.Source(write(tmp_path, "w00 1:1\nw00 900:1\n")))
    with pytest.raises(UserError, match=r"must have indices of at most 32 .*as the model has.*, got 900 in line 2 of"):
        tasks.measure(done.model, batches)


def test_one_row_in_twenty_is_held_out_the_same_ones_each_time(tmp_path):
    data = problems.write_features(tmp_path)
    task, again = read(tmp_path, data), read(tmp_path / "again", data)
    held_out = [target.tolist() for _, target, _ in task.held_out(None)]
    assert sum(map(len, held_out)) == 12
    assert held_out == [target.tolist() for _, target, _ in again.held_out(None)]
    assert task.spec.counts.sum() == 228
    assert "one row in 20 is held out" in task.summary


def test_a_file_may_be_held_out(tmp_path):
    data = write(tmp_path, "".join(f"c{i} {i + 1}:1\n" for i in range(8)))
    held_out = write(tmp_path, "c1 1:1\nunicorn 2:1\nc3,c2 8:1\n", "held.svm")
    task = read(tmp_path, data, held_out=held_out)
    names = [task.spec.names[c] for _, target, _ in task.held_out(None) for c in target.tolist()]
    assert names == ["c1", "c3", "c2"]
    assert task.summary[1] == "held.svm: 3 rows held out, 1 left out for labels that are not trained on"
    # All rows of the other file are trained on, and held-out labels add no class.
    assert task.spec.counts.tolist() == [1] * 8


def test_a_held_out_file_of_other_labels_alone_is_refused(tmp_path):
    data = write(tmp_path, "a 1:1\nb 2:1\n")
    held_out = write(tmp_path, "unicorn 1:1\nhorse 1:1\n", "held.svm")
    with pytest.raises(UserError, match="`held-out` must hold labels that are trained on, got none in"):
        read(tmp_path, data, held_out=held_out)


def test_rows_without_labels_are_neither_trained_on_nor_held_out(tmp_path):
    task = read(tmp_path, write(tmp_path, " 1:1\n" * 200 + "a 1:1\nb 2:1\na,b 3:1\n"))
    assert sum(len(target) for _, target, _ in task.train) + sum(len(t) for _, t, _ in task.held_out(None)) == 4


def test_a_part_of_the_held_out_rows_is_evenly_spaced(tmp_path):
    data = problems.write_features(tmp_path, rows=2000)
    task = read(tmp_path, data)
    every = torch.cat([target for _, target, _ in task.held_out(None)])
    some = torch.cat([target for _, target, _ in task.held_out(30)])
    assert len(every) == 100
    assert 25 <= len(some) <= 30
    assert torch.equal(some, every[::4])


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.parquet", "rows.npz", "rows.npy"])
def test_every_format_is_trained_on_evaluated_and_predicted(tmp_path, name):
    rng = np.random.default_rng(0)
    label = rng.integers(6, size=120)
    x = np.eye(6, dtype=np.float32)[label] + 0.1 * rng.standard_normal((120, 6), dtype=np.float32)
    names = np.array([f"c{i}" for i in label])
    path, options = tmp_path / name, {}
    if name.endswith("npz"):
        np.savez(path, X=x, y=names)
    elif name.endswith("npy"):
        np.save(path, x)
        np.save(tmp_path / "labels.npy", names)
        options = {"labels": tmp_path / "labels.npy"}
    elif name.endswith("parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({**{f"x{j}": x[:, j] for j in range(6)}, "animal": names}), path)
        options = {"label": "animal"}
    else:
        between = "\t" if name.endswith("tsv") else ","
        lines = [between.join([*(f"x{j}" for j in range(6)), "animal"])]
        lines += [between.join([*map(str, row), own]) for row, own in zip(x.tolist(), names, strict=True)]
        path.write_text("\n".join(lines) + "\n")
        options = {"label": "animal"}
    settings = replace(SETTINGS["features"], epochs=12, learning_rate=0.5)
    done, _ = fit("features", tmp_path, data=path, settings=settings, **options)
    batches, _ = TASK.evaluation_batches(done.model.spec, tasks.Source(path, **options))
    assert tasks.measure(done.model, batches).metrics["accuracy"] > 0.9
    answers = [answer.names[0] for answer in tasks.predict(done.model, tasks.Source(path), number=1)]
    assert np.mean(np.array(answers) == names) > 0.9


def test_words_of_a_table_say_what_it_is(tmp_path):
    says = {"cat": "meow meow", "cow": "moo", "dog": "loud woof", "duck": "Quack!"}
    rows = [f"{says[name]},{name}" for name in list(says) * 30]
    data = write(tmp_path, "says,animal\n" + "\n".join(rows) + "\n", "says.csv")
    settings = replace(SETTINGS["features"], epochs=8, rank=8)
    _, out = fit("features", tmp_path, data=data, settings=settings, label="animal")
    queries = write(tmp_path, "says\nquack quack\na woof\n", "queries.csv")
    answers = tasks.predict(tasks.open_model(out), tasks.Source(queries), number=1)
    assert [answer.names for answer in answers] == [("duck",), ("dog",)]


def test_names_of_a_spec_are_in_the_order_of_the_file(tmp_path):
    task = read(tmp_path, write(tmp_path, "b 1:1\na 2:1\nb 3:1\nc 1:1\n"))
    assert list(task.spec.names) == list(Names(["b", "a", "c"]))
