"""Sequences: the last item of each user is ranked among all items."""

import pytest
import torch

from manyclass import tasks
from manyclass.errors import UserError
from manyclass.tasks.sequences import LastItems
from tests.tasks.problems import SETTINGS, write_sequences

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
    expected = "left out: 2 lines of items that the model does not know, and 1 users whose last line is one"
    assert about[1] == expected
    ((inputs, target),) = batches
    assert [done.model.names[i] for i in inputs["ids"][0].tolist()] == ["w00", "w01", "w02"]
    assert target.tolist() == [done.model.names.ids("w03")]
    # A user whose last item is unknown is left out.
    path.write_text("u\tw00\nu\tw01\nu\tw02\nu\tunicorn\nv\tw05\nv\tunicorn\nv\tw06\nv\tw07\n")
    ((inputs, target),) = TASK.evaluation_batches(done.model.spec, tasks.Source(path))[0]
    assert [[done.model.names[i] for i in row] for row in inputs["ids"].tolist()] == [["w05", "w06"]]
    path.write_text("u\tw00\nu\tw01\n")
    with pytest.raises(UserError, match="`data` must hold a user of 3 items, the last one known, got none in"):
        TASK.evaluation_batches(done.model.spec, tasks.Source(path))
    path.write_text("u\thorse\n")
    with pytest.raises(UserError, match="of 1 lines none has an item that the model knows"):
        TASK.evaluation_batches(done.model.spec, tasks.Source(path))


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
