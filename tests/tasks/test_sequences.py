"""Sequences: the last item of each user is ranked among all items."""

from dataclasses import replace

import pytest
import torch

from manyclass import tasks
from manyclass.errors import UserError
from manyclass.tasks.sequences import LastItems
from tests.tasks.problems import SETTINGS, fit, write_sequences

TASK = tasks.TASKS["sequences"]


def lines(path):
    """Return the items of each user, by a loop over the file."""
    found = {}
    for line in path.read_text().splitlines():
        user, item = line.split("\t")
        found.setdefault(user, []).append(item)
    return found


def test_the_last_item_of_each_user_is_ranked_among_all(trained):
    done, _, data = trained("sequences")
    model = done.model.eval()
    batches, about = TASK.evaluation_batches(model.spec, tasks.Source(data))
    measured = tasks.measure(model, batches)
    assert about == (f"views.tsv: the last item of 60 users, ranked among all {len(model.names)}",)
    hits, gains, losses = [], [], []
    with torch.no_grad():
        for items in lines(data).values():
            ids = [model.names.ids(item) for item in items]
            scores = model.head.weight @ model.encoder(torch.tensor([ids[:-1]]))[0, -1] + model.head.bias
            # Items that the user already has are ranked too, because users repeat items.
            rank = 1 + (scores > scores[ids[-1]]).sum().item()
            hits.append(rank <= 10)
            gains.append(1 / torch.tensor(1.0 + rank).log2().item() if rank <= 10 else 0.0)
            losses.append(-scores.log_softmax(0)[ids[-1]].item())
    assert measured.examples == 60
    assert measured.metrics["HR@10"] == pytest.approx(sum(hits) / 60)
    assert measured.metrics["NDCG@10"] == pytest.approx(sum(gains) / 60, rel=1e-5)
    assert measured.loss == pytest.approx(sum(losses) / 60, rel=1e-5)


def test_test_items_are_neither_trained_on_nor_used_for_selection(tmp_path):
    data = write_sequences(tmp_path)
    task = TASK.read(tasks.Source(data), SETTINGS["sequences"].over(TASK.defaults), tmp_path / "none")
    items, names = lines(data), task.spec.names
    assert task.spec.counts.sum() == sum(len(own) - 2 for own in items.values())
    chosen_by = [names[c] for _, target in task.held_out(None) for c in target.tolist()]
    assert chosen_by == [own[-2] for own in items.values()]
    trained_on = sum((target >= 0).sum().item() for _, target in task.train)
    assert trained_on == sum(len(own) - 3 for own in items.values())


def test_padding_is_no_example_of_a_training(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("".join(f"a\tw{i}\n" for i in range(9)) + "b\tw1\nb\tw5\nc\tw3\nc\tw2\nc\tw4\nc\tw3\n")
    settings = replace(SETTINGS["sequences"], batch_size=8).over(TASK.defaults)
    task = TASK.read(tasks.Source(path), settings, tmp_path / "none")
    ((inputs, target),) = task.train
    names, before = task.spec.names, inputs["ids"].flatten()[inputs["places"]]
    pairs = {(names[i], names[j]) for i, j in zip(before.tolist(), target.tolist(), strict=True)}
    assert pairs == {*((f"w{i}", f"w{i + 1}") for i in range(6)), ("w1", "w5"), ("w3", "w2")}
    assert target.shape == (8,)


def test_only_as_much_of_the_past_is_read_as_was_trained_on(trained, tmp_path):
    done, _, _ = trained("sequences")
    path = tmp_path / "long.tsv"
    path.write_text("".join(f"u\tw{i % 24:02}\n" for i in range(40)))
    ((inputs, _),) = TASK.evaluation_batches(done.model.spec, tasks.Source(path))[0]
    assert [done.model.names[i] for i in inputs["ids"][0].tolist()] == [f"w{i % 24:02}" for i in range(27, 39)]
    assert inputs["last"].tolist() == [11]


def test_a_limit_takes_users_evenly_spaced(tmp_path):
    data = write_sequences(tmp_path, users=1200)
    task = TASK.read(tasks.Source(data), SETTINGS["sequences"].over(TASK.defaults), tmp_path / "none")
    sizes = {limit: [len(target) for _, target in task.held_out(limit)] for limit in (None, 10, 1100, 10_000)}
    assert sizes == {None: [512, 512, 176], 10: [10], 1100: [512, 88], 10_000: [512, 512, 176]}
    assert all(len(task.held_out(limit)) == len(found) for limit, found in sizes.items())
    assert isinstance(task.held_out(None), LastItems)


def test_unknown_items_are_left_out_and_reported(trained, tmp_path):
    done, _, _ = trained("sequences")
    path = tmp_path / "new.tsv"
    path.write_text("u\tw00\nu\tunicorn\nu\tw01\nv\thorse\nu\tw02\nu\tw03\n")
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(path))
    assert about[0] == "new.tsv: the last item of 1 users, ranked among all 24"
    # The only item of v is unknown too, but one item could not be predicted from others in any case.
    expected = "left out: 1 users with one item, of the others 1 lines of items that the model does not know"
    assert about[1] == expected
    ((inputs, target),) = batches
    assert [done.model.names[i] for i in inputs["ids"][0].tolist()] == ["w00", "w01", "w02"]
    assert target.tolist() == [done.model.names.ids("w03")]
    # A user whose last item is unknown is left out.
    path.write_text("u\tw00\nu\tw01\nu\tw02\nu\tunicorn\nv\tw05\nv\tunicorn\nv\tw06\nv\tw07\n")
    ((inputs, target),) = TASK.evaluation_batches(done.model.spec, tasks.Source(path))[0]
    assert [[done.model.names[i] for i in row] for row in inputs["ids"].tolist()] == [["w05", "w06"]]
    path.write_text("u\tw00\nv\tw01\nv\tunicorn\n")
    wanted = "`data` must hold a user of 2 items that the model knows, one of them the last, got none in"
    with pytest.raises(UserError, match=wanted):
        TASK.evaluation_batches(done.model.spec, tasks.Source(path))
    path.write_text("u\thorse\n")
    with pytest.raises(UserError, match="of 1 lines none has an item that the model knows"):
        TASK.evaluation_batches(done.model.spec, tasks.Source(path))


SESSIONS = (
    "a\tw00\na\tw01\n"  # counts
    "b\tw02\n"  # one item
    "c\tw03\nc\tw04\nc\tunicorn\n"  # the last item is unknown
    "d\tunicorn\nd\tw05\n"  # no known item before the last
    "e\tw06\ne\tunicorn\ne\tw07\n"  # counts, without the unknown item
    "f\thorse\nf\thorse\n"  # the last item is unknown
    "g\tw08\ng\tw09\ng\tw10\n"  # counts
)
REASONS = (
    "left out: 1 users with one item, 2 users whose last item the model does not know, 1 users with no item before the "
    "last that the model knows, of the others 1 lines of items that the model does not know"
)


def test_every_session_of_a_test_file_counts_or_is_left_out_for_a_reason(trained, tmp_path):
    done, _, _ = trained("sequences")
    path = tmp_path / "sessions.tsv"
    path.write_text(SESSIONS)
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(path))
    ((inputs, target),) = batches
    names = done.model.names
    rows = zip(inputs["ids"].tolist(), inputs["last"].tolist(), strict=True)
    assert [[names[i] for i in row[: last + 1]] for row, last in rows] == [["w00"], ["w06"], ["w08", "w09"]]
    assert [names[i] for i in target.tolist()] == ["w01", "w07", "w10"]
    assert about == ("sessions.tsv: the last item of 3 users, ranked among all 24", REASONS)


def test_users_trained_on_in_full_are_no_test(tmp_path):
    data = write_sequences(tmp_path, users=30)
    data.write_text(data.read_text() + "".join(f"short{i}\tw00\nshort{i}\tw01\n" for i in range(7)) + "one\tw00\n")
    done, _ = fit("sequences", tmp_path, data=data)
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(data))
    assert about[0].startswith("views.tsv: the last item of 30 users,")
    assert about[1] == "left out: 1 users with one item, 7 users with two items, which are trained on"
    # The same users in another file are a test.
    other = tmp_path / "other.tsv"
    other.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(other))
    assert about == (f"other.tsv: the last item of 37 users, ranked among all {len(done.model.names)}",)
    assert sum(len(target) for _, target in batches) == 37


def test_with_a_held_out_file_all_of_the_data_is_trained_on(tmp_path):
    data, held_out = write_sequences(tmp_path), tmp_path / "sessions.tsv"
    held_out.write_text(SESSIONS)
    settings = SETTINGS["sequences"].over(TASK.defaults)
    task = TASK.read(tasks.Source(data, held_out=held_out), settings, tmp_path / "none")
    items, names = lines(data), task.spec.names
    assert task.spec.counts.sum() == sum(map(len, items.values()))
    assert sum((target >= 0).sum().item() for _, target in task.train) == sum(len(own) - 1 for own in items.values())
    assert [names[c] for _, target in task.held_out(None) for c in target.tolist()] == ["w01", "w07", "w10"]
    assert [len(target) for _, target in task.held_out(2)] == [2]
    assert task.summary == (
        "views.tsv: 540 interactions of 60 users with 24 items",
        "held out: the last item of 3 users of sessions.tsv",
        REASONS,
    )
    alone = TASK.read(tasks.Source(data), settings, tmp_path / "none")
    assert alone.summary[1] == "held out: the last item but one of 60 users; the last is left for `evaluate`"


@pytest.mark.parametrize(
    ("data", "held_out", "message"),
    [
        ("u\ta\nu\tb\n", None, "`held-out` must be a file that can be read, got .*: No such file"),
        ("u\ta\nu\tb\n", "v\ta\n", "`held-out` must hold a user of 2 items that the model knows, one of them the last"),
        ("u\ta\nu\tb\n", "v\tc\n", "`held-out` must hold lines of user and item, of 1 lines none has an item that"),
        ("u\ta\nu\tb\n", "v a b\n", "`held-out` must hold user and item in each line, got 'v a b' in line 1 of"),
        ("u\ta\nv\tb\n", "v\ta\nv\tb\n", "`data` must hold a user of 2 items to train on, got none in"),
    ],
)
def test_a_held_out_file_without_a_session_is_refused(tmp_path, data, held_out, message):
    path, other = tmp_path / "data.tsv", tmp_path / "held_out.tsv"
    path.write_text(data)
    if held_out is not None:
        other.write_text(held_out)
    with pytest.raises(UserError, match=message):
        TASK.read(tasks.Source(path, held_out=other), TASK.defaults, tmp_path / "none")


def test_the_model_trained_on_a_whole_file_is_not_tested_on_it(tmp_path):
    data, held_out = write_sequences(tmp_path), tmp_path / "sessions.tsv"
    held_out.write_text(SESSIONS)
    done, out = fit("sequences", tmp_path, data=data, held_out=held_out)
    assert done.measured.examples == 3
    about = TASK.evaluation_batches(done.model.spec, tasks.Source(data))[1]
    assert about[1] == "the model was trained on these items, so this is no test of it"
    about = TASK.evaluation_batches(tasks.open_model(out).spec, tasks.Source(held_out))[1]
    assert about[1] == REASONS


def test_a_folder_may_hold_train_valid_and_test(tmp_path):
    folder = tmp_path / "split"
    folder.mkdir()
    for seed, (name, users) in enumerate((("train", 60), ("valid", 5), ("test", 4))):
        write_sequences(folder, name=f"{name}.tsv", users=users, seed=seed)
    done, _ = fit("sequences", tmp_path, data=folder)
    assert done.measured.examples == 5
    assert done.summary[1] == "held out: the last item of 5 users of valid.tsv"
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(folder))
    assert tasks.measure(done.model, batches).examples == 4
    assert about == ("test.tsv: the last item of 4 users, ranked among all 24",)
    (folder / "train.tsv").rename(folder / "other.tsv")
    with pytest.raises(UserError, match=r"`data` must be a file, or a folder with train.txt, got .*, which has"):
        TASK.read(tasks.Source(folder), SETTINGS["sequences"].over(TASK.defaults), tmp_path / "none")


def test_the_best_model_is_that_of_the_best_ndcg_at_the_first_k(tmp_path):
    settings = replace(SETTINGS["sequences"], at=(2, 5), epochs=3)
    done, out = fit("sequences", tmp_path, settings=settings)
    names = ["MRR", "HR@2", "NDCG@2", "MRR@2", "HR@5", "NDCG@5", "MRR@5"]
    assert list(done.measured.metrics) == names
    assert (out / "log.csv").read_text().splitlines()[0].endswith(f",{','.join(names)}")
    evaluated = [record for record in done.history.records if record.held_out_loss is not None]
    best = max(evaluated, key=lambda record: record.metrics["NDCG@2"])
    assert done.history.best_step == best.step
    # An evaluation measures the same, unless others are wanted.
    batches = TASK.evaluation_batches(done.model.spec, tasks.Source(tmp_path / "views.tsv"))[0]
    opened = tasks.open_model(out)
    assert list(tasks.measure(opened, batches).metrics) == names
    assert list(tasks.measure(opened, batches, at=(3,)).metrics) == ["MRR", "HR@3", "NDCG@3", "MRR@3"]


def test_every_user_gets_a_prediction_without_items_already_seen(trained, tmp_path):
    done, _, _ = trained("sequences")
    path = tmp_path / "new.tsv"
    path.write_text("u\tw00\nv\tw05\nu\tw01\nx\tw09\nu\tw00\n")
    names = done.model.names
    queries = list(TASK.predict_batches(done.model.spec, tasks.Source(path), size=2, seen=True))
    assert [batch.shown for batch in queries] == [["u", "v"], ["x"]]
    assert {names[i] for i in queries[0].seen[0].tolist() if i >= 0} == {"w00", "w01"}
    assert {names[i] for i in queries[0].seen[1].tolist() if i >= 0} == {"w05"}
    last = queries[0].inputs["last"].tolist()
    assert [names[i] for i in queries[0].inputs["ids"][0, : last[0] + 1].tolist()] == ["w00", "w01", "w00"]
