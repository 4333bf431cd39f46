"""A checkpoint with a valid digest but of another training is refused before anything is changed."""

import copy

import pytest
import torch

from manyclass import storage, tasks
from manyclass.errors import UserError
from tests.tasks.problems import Interrupts, fit

OPTIONS = tasks.RunOptions(checkpoint_every=1000)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the folder of an interrupted training, and its newest checkpoint."""
    options = tasks.RunOptions(checkpoint_every=1000, callbacks=[Interrupts(5)])
    _, out = fit("text", tmp_path_factory.mktemp("stopped"), options=options)
    return out, storage.load(out / "newest.safetensors", content_type="checkpoint")


def sum_of(state):
    return state["optimizers"][0]["state"][0]


CHANGES = {
    "position": (lambda s: s["training"]["progress"].update(position=10**6), "beyond the end of an epoch"),
    "step": (lambda s: s["training"]["progress"].update(step="5"), r"its training\['progress'\]\['step'\]"),
    "records": (lambda s: s["training"].update(records=[{"step": 1}]), "its records are damaged"),
    "decision": (lambda s: s["training"]["records"][0].update(decision=5), "its records are damaged"),
    "probe": (lambda s: s["training"].update(probe=[1.0]), "`state` must hold 12 numbers, got 1"),
    "probe's past": (lambda s: s["training"]["probe"].__setitem__(0, 1e9), "`state` must hold steps from 0 to 2⁵³"),
    "probe's types": (lambda s: s["training"].update(probe=["1"] * 12), "its probes are damaged"),
    "extra probe": (lambda s: s["training"].update(extra_probe=["1"]), "its probes are damaged"),
    "no probes": (lambda s: s["training"].pop("probe"), "it does not describe a training"),
    "best": (lambda s: s["training"]["best"].update(waited=-1), "its best evaluation is damaged"),
    "spent": (lambda s: s["training"]["spent"].update(update="long"), "time by phase is damaged"),
    "random": (lambda s: s["training"].update(rng_now=[torch.zeros(5056).byte()]), "mt19937"),
    "shape": (lambda s: sum_of(s).update(sum=torch.zeros(3)), "an optimiser's sum is not what it should be"),
    "infinite": (lambda s: sum_of(s)["sum"].fill_(torch.inf), "an optimiser's sum is not finite"),
    "missing": (lambda s: s["optimizers"][1]["state"][0].pop("exp_avg"), "an optimiser's state is not what it should"),
    "negative": (lambda s: s["optimizers"][1]["state"][0]["step"].fill_(-3), "an optimiser's step is negative"),
    "learning_rate": (lambda s: s["optimizers"][0]["param_groups"][0].update(lr=None), r"an optimiser\[0\]\['lr'\]"),
    "parameters": (lambda s: s["optimizers"][0]["param_groups"][0].update(params=[1, 0]), "has other parameters"),
    "schedule": (lambda s: s["schedulers"][0].update(last_epoch=-3), "a schedule"),
    "weights": (
        lambda s: s["state_dict"].update({"head.bias": torch.full((25,), torch.nan)}),
        "head.bias is not finite",
    ),
    "model": (lambda s: s["model"]["parameters"].pop("head.bias"), "parameters of such a model: head.bias"),
    "layers": (lambda s: s["model"]["settings"].update(layers=900), "not have the parameters of such a model"),
    "size": (lambda s: s["model"]["settings"].update(dim=10**6), "not have the parameters of such a model"),
    "split": (lambda s: s["model"]["config"].update(split="letters"), "`split` must be one of"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_of_another_form_is_refused(stopped, name):
    change, message = CHANGES[name]
    out, content = stopped
    content = copy.deepcopy(content)
    change(content["state"])
    path = out / "newest.safetensors"
    before = path.read_bytes()
    try:
        storage.save(path, content, content_type="checkpoint")
        held = {file.name: file.read_bytes() for file in out.iterdir()}
        with pytest.raises(UserError, match=message):
            tasks.resume(out, options=OPTIONS)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == held
    finally:
        path.write_bytes(before)


def test_a_damaged_checkpoint_is_refused_before_data_is_read(stopped):
    out, _ = stopped
    path = out / "newest.safetensors"
    before = path.read_bytes()
    try:
        path.write_bytes(before[:-1])
        with pytest.raises(
            UserError, match=r"newest.safetensors: it is cut off.*; nothing else in .* can be resumed from"
        ):
            tasks.resume(out, options=tasks.RunOptions(progress=lambda done, total: pytest.fail("data was read")))
    finally:
        path.write_bytes(before)
