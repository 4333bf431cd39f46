"""Triples: tails, and heads by reciprocal relations, with filtered ranks."""

import pytest
import torch

from manyclass import storage, tasks
from manyclass.errors import UserError
from manyclass.tasks.triples import TripleBatches
from tests.tasks.problems import SETTINGS, write_triples

TASK = tasks.TASKS["triples"]


def lines(path):
    return [tuple(line.split("\t")) for line in path.read_text().splitlines()]


def slow(model, queries, known):
    """Return filtered ranks of tails and heads, by complex arithmetic."""
    entities = torch.complex(*model.encoder.entities.weight.detach().double().chunk(2, 1))
    relations = torch.complex(*model.encoder.relations.weight.detach().double().chunk(2, 1))
    names, kinds = model.names, list(model.spec.config["relations"])
    ranks = []
    for backwards in (False, True):
        for head, relation, tail in queries:
            given, wanted = (tail, head) if backwards else (head, tail)
            row = relations[kinds.index(relation) + (len(kinds) if backwards else 0)]
            scores = (entities[names.ids(given)] * row * entities.conj()).sum(1).real
            others = {
                h if backwards else t for h, r, t in known if r == relation and (t if backwards else h) == given
            } - {wanted}
            left = [i for i, name in enumerate(names) if name not in others]
            own = names.ids(wanted)
            ranks.append(1 + sum((scores[i] > scores[own]).item() for i in left))
    return ranks


def test_ranks_of_a_folder_are_filtered_by_all_of_it_both_ways(trained):
    done, _, data = trained("triples")
    parts = {part: lines(data / f"{part}.txt") for part in ("train", "valid", "test")}
    ranks = slow(done.model, parts["test"], [triple for part in parts.values() for triple in part])
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(data))
    measured = tasks.measure(done.model, batches)
    assert about == ("graph: 10 test triples, each both ways, ranks filtered",)
    assert measured.examples == len(ranks) == 20
    assert measured.metrics["MRR"] == pytest.approx(sum(1 / rank for rank in ranks) / 20)
    for n in (1, 3, 10):
        assert measured.metrics[f"hits@{n}"] == pytest.approx(sum(rank <= n for rank in ranks) / 20)


def test_a_file_is_filtered_by_itself_and_by_the_training_triples(trained):
    done, out, data = trained("triples")
    parts = {part: lines(data / f"{part}.txt") for part in ("train", "valid", "test")}
    model = tasks.open_model(out)
    ranks = slow(model, parts["test"], [triple for part in parts.values() for triple in part])
    batches, about = TASK.evaluation_batches(model.spec, tasks.Source(data / "test.txt"))
    assert about == ("test.txt: 10 triples, each both ways, ranks filtered",)
    assert tasks.measure(done.model, batches).metrics["MRR"] == pytest.approx(sum(1 / rank for rank in ranks) / 20)


@pytest.mark.parametrize(
    "known",
    [
        None,
        torch.zeros(0, 3, dtype=torch.int32),
        torch.zeros(4, 2, dtype=torch.int32),
        torch.zeros(4, 3),
        torch.tensor([[0, -1, 0]], dtype=torch.int32),
        torch.tensor([[0, 0, 1000]], dtype=torch.int32),
        torch.tensor([[0, 1000, 0]], dtype=torch.int32),
    ],
)
def test_a_model_with_triples_beyond_its_ids_is_refused(trained, tmp_path, known):
    done, _, _ = trained("triples")
    content = done.model.content()
    content["config"] = {**content["config"], "known": known}
    storage.save(tmp_path / "best.safetensors", content, content_type="model")
    with pytest.raises(UserError, match="does not hold a model that this version knows: `known` must be triples"):
        tasks.open_model(tmp_path)


def test_ranks_of_held_out_triples_are_filtered_too(trained):
    done, _, data = trained("triples")
    parts = {part: lines(data / f"{part}.txt") for part in ("train", "valid", "test")}
    ranks = slow(done.model, parts["valid"], [triple for part in parts.values() for triple in part])
    assert done.measured.metrics["MRR"] == pytest.approx(sum(1 / rank for rank in ranks) / 20)


def test_training_goes_both_ways_and_counts_both_ends(tmp_path):
    data = write_triples(tmp_path)
    task = TASK.read(tasks.Source(data), SETTINGS["triples"].over(TASK.defaults), tmp_path / "none")
    names, kinds = task.spec.names, task.spec.config["relations"]
    seen = set()
    for pairs, tails in ((pairs, tails) for pairs, tails, _ in task.train):
        for (given, relation), wanted in zip(pairs.tolist(), tails.tolist(), strict=True):
            forwards = relation < len(kinds)
            ends = (names[given], names[wanted]) if forwards else (names[wanted], names[given])
            seen.add((ends[0], kinds[relation % len(kinds)], ends[1], forwards))
    assert seen == {(*triple, way) for triple in lines(data / "train.txt") for way in (True, False)}
    counts = dict.fromkeys(names, 0)
    for head, _, tail in lines(data / "train.txt"):
        counts[head] += 1
        counts[tail] += 1
    assert dict(zip(names, task.spec.counts.tolist(), strict=True)) == counts


def test_of_a_file_alone_one_triple_in_twenty_is_held_out(tmp_path):
    data = write_triples(tmp_path) / "train.txt"
    task = TASK.read(tasks.Source(data), SETTINGS["triples"].over(TASK.defaults), tmp_path / "none")
    assert sum(len(tails) for _, tails, _ in task.held_out(None)) == 2 * 5
    assert sum(len(tails) for _, tails, _ in task.train) == 2 * 95
    again = TASK.read(tasks.Source(data), SETTINGS["triples"].over(TASK.defaults), tmp_path / "none")
    assert torch.equal(task.spec.counts, again.spec.counts)


def test_orders_follow_from_seed_and_epoch():
    triples = torch.arange(300).reshape(100, 3)
    batches = TripleBatches(triples, 30, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        assert len(list(batches)) == len(batches) == 4
        orders.append(torch.cat([tails for _, tails, _ in batches]))
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[1].sort().values, triples[:, 2])
    assert torch.equal(torch.cat([tails for _, tails, _ in TripleBatches(triples, 30)]), triples[:, 2])


def test_unknown_entities_and_relations_are_left_out_and_reported(trained, tmp_path):
    done, _, _ = trained("triples")
    path = tmp_path / "new.txt"
    path.write_text("w00\tplus 1\tw01\nw00\tplus 1\tunicorn\nw00\trides\tw01\n")
    batches, about = TASK.evaluation_batches(done.model.spec, tasks.Source(path))
    output = "; 2 of entities or relations that the model does not know are left out"
    assert about[0].endswith(output)
    assert tasks.measure(done.model, batches).examples == 2
    path.write_text("horse\tplus 1\tunicorn\n")
    with pytest.raises(UserError, match="`data` must hold triples that the model knows, got 1 of others in"):
        TASK.evaluation_batches(done.model.spec, tasks.Source(path))


def test_a_line_leaves_the_tail_or_the_head_open(trained, tmp_path):
    done, _, _ = trained("triples")
    path = tmp_path / "queries.txt"
    path.write_text("w03\tplus 2\nw03\tplus 2\t?\n?\tplus 2\tw03\n")
    (queries,) = TASK.predict_batches(done.model.spec, tasks.Source(path), size=9, seen=True)
    entity, kinds = done.model.names.ids("w03"), list(done.model.spec.config["relations"])
    relation = kinds.index("plus 2")
    assert queries.inputs.tolist() == [[entity, relation], [entity, relation], [entity, relation + len(kinds)]]
    assert queries.shown == path.read_text().splitlines()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("w03", "head TAB relation, or a \\? in the place of"),
        ("?\tplus 2\t?", "head TAB relation, or a \\? in the place of"),
        ("w03\tplus 2\tw05", "head TAB relation, or a \\? in the place of"),
        ("horse\tplus 2", "entities and relations that the model knows, got 'horse"),
        ("w03\trides\t?", "entities and relations that the model knows, got 'w03"),
    ],
)
def test_a_line_that_leaves_nothing_open_is_named(trained, tmp_path, line, message):
    done, _, _ = trained("triples")
    path = tmp_path / "queries.txt"
    path.write_text(f"w03\tplus 2\n{line}\n")
    with pytest.raises(UserError, match=f"`data` must hold {message}.* in line 2 of"):
        list(TASK.predict_batches(done.model.spec, tasks.Source(path), size=9, seen=True))
