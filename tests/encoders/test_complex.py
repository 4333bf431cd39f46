"""ComplEx against complex arithmetic."""

import pytest
import torch
from torch import nn

from manyclass.encoders import ComplEx


def model(*, sparse=False):
    torch.manual_seed(0)
    made = ComplEx(nn.Embedding(30, 12, sparse=sparse), 4).double()
    with torch.no_grad():
        for table in (made.entities, made.relations):
            nn.init.normal_(table.weight)
    return made


def triples():
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(n, (50,), generator=generator) for n in (30, 4, 30)], 1)


def complex_rows(table):
    return torch.complex(*table.weight.detach().chunk(2, 1))


def test_scores_are_the_real_part_of_a_product_of_three():
    made, every = model(), triples()
    entities, relations = complex_rows(made.entities), complex_rows(made.relations)
    query = made(every[:, :2])
    for i, (head, relation, _) in enumerate(every.tolist()):
        product = (entities[head] * relations[relation] * entities.conj()).sum(1)
        torch.testing.assert_close(made.entities.weight @ query[i], product.real)


def test_cubes_are_those_of_a_loop():
    made, every = model(), triples()
    entities, relations = complex_rows(made.entities), complex_rows(made.relations)
    whole = 0.0
    for head, relation, tail in every.tolist():
        for row in (entities[head], relations[relation], entities[tail]):
            whole += sum(abs(z) ** 3 for z in row.tolist())
    assert made.cubes(every[:, :2], every[:, 2]).item() == pytest.approx(whole / len(every))


def test_gradients_of_touched_rows_are_those_of_whole_tables():
    every = triples()[:3]
    found = []
    for sparse in (False, True):
        made = model(sparse=sparse)
        made.relations.sparse = sparse
        (made(every[:, :2]).square().sum() + made.cubes(every[:, :2], every[:, 2])).backward()
        found.append([table.weight.grad for table in (made.entities, made.relations)])
    for dense, rows in zip(*found, strict=True):
        assert rows.is_sparse
        torch.testing.assert_close(rows.to_dense(), dense)


def test_relations_are_as_sparse_as_entities():
    assert ComplEx(nn.Embedding(30, 12, sparse=True), 4).relations.sparse
    assert not ComplEx(nn.Embedding(30, 12), 4).relations.sparse


def test_first_entries_are_small_and_the_given_ones_stay():
    entities = nn.Embedding(300, 40)
    given = entities.weight.detach().clone()
    made = ComplEx(entities, 100)
    assert 0.9e-3 < made.relations.weight.std().item() < 1.1e-3
    assert torch.equal(made.entities.weight, given)
