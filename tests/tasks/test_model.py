"""Models in a folder, and content that is no model."""

from dataclasses import replace

import pytest
import torch

from manyclass import storage, tasks
from manyclass.errors import UserError
from manyclass.tasks.model import model_from_content
from tests.tasks.problems import KINDS


def assert_equal_trees(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_equal_trees(ours[name], value)
    else:
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_the_content_is_all_that_predictions_need(trained, tmp_path, kind):
    done, _, _ = trained(kind)
    storage.save(tmp_path / "best.safetensors", done.model.content(), content_type="model")
    opened = tasks.open_model(tmp_path)
    assert opened.spec.task.kind == kind
    assert list(opened.names) == list(done.model.names)
    assert torch.equal(opened.spec.counts, done.model.spec.counts)
    assert set(opened.spec.config) == set(done.model.spec.config)
    assert_equal_trees(opened.spec.config, done.model.spec.config)
    assert not any(name.startswith("head.sampler.") for name in done.model.content()["parameters"])


def test_opening_draws_nothing(trained):
    _, folder, _ = trained("text")
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    tasks.open_model(folder)
    assert torch.equal(torch.rand(3), expected)


def test_the_best_is_opened_and_else_the_newest(trained, tmp_path):
    _, folder, _ = trained("features")
    newest = storage.load(folder / "newest.safetensors", content_type="checkpoint")
    storage.save(tmp_path / "newest.safetensors", newest, content_type="checkpoint")
    opened = tasks.open_model(tmp_path)
    assert torch.equal(opened.head.weight, newest["state"]["state_dict"]["head.weight"])
    with pytest.raises(UserError, match=r"best.safetensors: there is no such file; .*newest.safetensors can be read"):
        tasks.open_model(tmp_path, checkpoint="best")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(kind="pictures"),
        lambda content: content.update(kind={}),
        lambda content: content.pop("names"),
        lambda content: content.update(names=content["counts"]),
        lambda content: content.update(counts=content["counts"][:3]),
        lambda content: content.update(counts="many"),
        lambda content: content.update(counts=-content["counts"]),
        lambda content: content.update(config={}),
        lambda content: content.update(config=5),
        lambda content: content.update(settings={"colour": "red"}),
        lambda content: content["parameters"].pop("head.bias"),
        lambda content: content["parameters"].update(extra=torch.zeros(1)),
        lambda content: content["parameters"].update({"head.bias": torch.zeros(2)}),
        lambda content: content.update(parameters=5),
        lambda content: content.clear(),
    ],
)
def test_content_that_is_no_model_is_refused_in_one_line(trained, tmp_path, change):
    done, _, _ = trained("features")
    content = done.model.content()
    change(content)
    with pytest.raises(UserError) as refused:
        model_from_content(content, tmp_path / "best.safetensors")
    assert "\n" not in str(refused.value)


def test_a_sampler_is_rebuilt(trained):
    done, _, _ = trained("features")
    content = done.model.content()
    content["settings"] = replace(done.model.spec.settings, sampler="systematic").to_json()
    assert type(model_from_content(content, None).head.sampler).__name__ == "Systematic"


@pytest.mark.parametrize("change", [lambda content: content.pop("format"), lambda content: content.update(format=1)])
def test_a_model_of_an_earlier_version_is_refused(trained, tmp_path, change):
    content = trained("features")[0].model.content()
    change(content)
    with pytest.raises(UserError, match="it was written by an earlier version of manyclass; train it again"):
        model_from_content(content, tmp_path / "best.safetensors")
