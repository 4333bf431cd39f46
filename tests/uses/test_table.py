"""Every public head and sampler is in the table of uses."""

import inspect

import manyclass
from manyclass import heads, samplers
from tests.test_public_names import public_classes
from tests.uses.table import HEADS, REBUILT, SAMPLERS, VARIANTS, WEIGHTS, head_of, sampler_of


def inner_types(sampler):
    return {type(module).__name__ for module in sampler.modules()}


def public_heads():
    """Return the names of public classes that have a loss and log-probabilities."""
    return {
        name
        for module in (manyclass, heads)
        for name in public_classes(module)
        if {"forward", "log_prob"} <= set(dir(getattr(module, name)))
    }


def public_samplers():
    return {name for name in public_classes(samplers) if hasattr(getattr(samplers, name), "draw")}


def test_every_sampler_is_in_the_table():
    assert public_samplers() == {type(make(WEIGHTS)).__name__ for make in SAMPLERS.values()}


def test_every_sampler_with_a_schedule_is_rebuilt_in_the_table():
    scheduled = {name for name in public_samplers() if "every" in inspect.signature(getattr(samplers, name)).parameters}
    assert scheduled == {type(make(WEIGHTS)).__name__ for make in REBUILT.values()} - {"WithExplicit"}


def test_every_head_is_in_the_table():
    assert public_heads() == {type(head_of((name, "exhaustive"))).__name__ for name in HEADS}
    assert public_heads() == {type(head_of((name, "exhaustive"))).__name__ for name in (*HEADS, *VARIANTS)}


def test_the_table_makes_another_sampler_each_time():
    for name in SAMPLERS:
        assert sampler_of(("class", name)) is not sampler_of(("class", name))
