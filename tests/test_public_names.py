"""Every public class is in a table over which all tests of its type run."""

import ast
import importlib
import inspect

import pytest
import torch

import manyclass
from manyclass import objectives, optim, samplers
from tests import tables
from tests.optim.tables import OPTIMISERS


def public_classes(module):
    return {
        name
        for name, value in ((name, getattr(module, name)) for name in dir(module))
        if inspect.isclass(value) and not name.startswith("_") and not getattr(value, "_is_protocol", False)
    }


def test_every_sampler_is_in_the_table():
    made = {type(make(torch.ones(6), 2, None)).__name__ for make in tables.SAMPLERS.values()}
    parts = {"Costs", "ErrorProbe", "Observation", "StepClock"}
    assert public_classes(samplers) - parts == made


def test_every_objective_is_in_the_table():
    made = {type(objective).__name__ for objective, *_ in tables.OBJECTIVES.values()}
    forms = {"LogSumExp", "PairSum"}
    assert public_classes(objectives) - forms == made


def test_every_optimiser_is_in_the_table():
    parameter = torch.nn.Parameter(torch.ones(2))
    # Chained is made of others, and is tested apart.
    assert public_classes(optim) - {"Chained"} == {type(ours([parameter])).__name__ for ours, _ in OPTIMISERS.values()}


def test_the_public_classes_are_as_documented():
    assert public_classes(manyclass) == {
        "Block",
        "Candidates",
        "ClassCounts",
        "ClassHead",
        "Diagnosis",
        "HierarchicalHead",
        "ManyClassClassifier",
        "ScorerHead",
    }
    assert callable(manyclass.diagnose)


def test_type_checkers_see_the_names_that_exist():
    tree = ast.parse(inspect.getsource(manyclass))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    for name, module in seen.items():
        found = getattr(importlib.import_module(module), name)
        assert getattr(manyclass, name) is found
    assert {name for name in seen if name not in manyclass._ROOMS} == set(manyclass._MODULE_OF)
    for room in manyclass._ROOMS:
        assert getattr(manyclass, room).__name__ == f"manyclass.{room}"
    with pytest.raises(AttributeError, match="has no attribute 'magic'"):
        _ = manyclass.magic


def test_every_public_class_has_a_docstring():
    for module in (manyclass, samplers, objectives, optim):
        for name in public_classes(module):
            assert inspect.getdoc(getattr(module, name)), name
