"""A model that does not fit into memory is refused before memory is allocated."""

from dataclasses import replace

import pytest
import torch

from manyclass import tasks
from manyclass.errors import UserError
from manyclass.tasks.model import Model
from manyclass.tasks.size import check_size, num_parameters
from tests.tasks import problems
from tests.tasks.problems import SETTINGS, fit


@pytest.mark.parametrize("kind", problems.KINDS)
def test_parameters_are_counted(kind, tmp_path):
    done, _ = fit(kind, tmp_path, settings=replace(SETTINGS[kind], epochs=1))
    spec = done.model.spec
    assert num_parameters(spec) == sum(parameter.numel() for parameter in done.model.parameters())
    check_size(spec, "cpu")


@pytest.mark.parametrize("dim", [10**8, 2**31 - 1])
def test_a_model_larger_than_memory_is_refused(tmp_path, dim):
    with pytest.raises(UserError, match="the model must fit into memory"):
        fit("text", tmp_path, settings=replace(SETTINGS["text"], dim=dim))
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize("name", ["batch_size", "dim", "rank", "length", "layers"])
def test_sizes_that_cannot_be_counted_are_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}` must be at most "):
        tasks.Settings(**{name: 10**30})


def test_a_spec_is_counted_without_its_memory(tmp_path):
    done, _ = fit("triples", tmp_path, settings=replace(SETTINGS["triples"], epochs=1))
    spec = done.model.spec
    large = replace(spec, settings=replace(spec.settings, dim=2 * 10**6))
    assert num_parameters(large) > 10**7
    state = torch.random.get_rng_state()
    num_parameters(spec)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(Model(spec), Model)
