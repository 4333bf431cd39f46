"""Distributed checkpoints are read on other numbers of processes, and by a whole head, bit for bit."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from manyclass import ClassHead
from manyclass.parallel import load_checkpoint, save_checkpoint, save_weights
from tests.parallel import divided_checks as checks
from tests.parallel.divided import C, D, automatic, make, weights
from tests.parallel.processes import call_together

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Return the folder, and the states of trainings on 4, 3 and 1 processes, each of which has loaded the last."""
    folder, before, found = tmp_path_factory.mktemp("checkpoints"), None, []
    for world in (4, 3, 1):
        call = functools.partial(checks.saved, folder=folder, ranks_before=before)
        found.append(call_together(call, tmp_path_factory.mktemp(f"ranks-{world}"), world)[0])
        before = world
    return folder, found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", [*checks.SAVED, "default"])
def test_rows_and_states_are_the_same_on_four_three_and_one_processes(states, name):
    _, (four, three, one) = states
    assert len(four[name]) > 8
    assert_equal(four[name], three[name])
    assert_equal(four[name], one[name])


@pytest.mark.parametrize("name", checks.SAVED)
def test_a_whole_head_reads_what_three_processes_saved(states, name):
    folder, (four, *_) = states
    head = make("learned", seed=9)
    parts = {"head": head, "optimizer": checks.SAVED[name](list(head.parameters(recurse=False)))}
    load_checkpoint(folder / f"{name}-3", parts)
    assert_equal(checks.whole(parts), four[name])


def test_processes_read_what_a_whole_head_saved_also_one_whose_classes_are_in_order_of_clusters(tmp_path):
    torch.manual_seed(0)
    head, expected = ClassHead(D, C, counts=weights(), sampler=automatic(), dtype=torch.float64), {}
    save_checkpoint(tmp_path / "default-0", {"head": head})
    for name in checks.SAVED:
        parts = trained_whole(name)
        save_checkpoint(tmp_path / f"{name}-0", parts)
        expected[name] = checks.whole(parts)
    for found in call_together(functools.partial(checks.saved, folder=tmp_path, ranks_before=0), tmp_path, 2):
        for name, state in expected.items():
            assert_equal(found[name], state)
        assert torch.equal(found["default"]["weight"], head.weight)
        assert torch.equal(found["default"]["sampler.shared.estimate"], head.sampler.shared.estimate)


def trained_whole(name):
    head = make("learned", seed=6)
    optimizer = checks.SAVED[name](list(head.parameters(recurse=False)))
    for step in range(5):
        optimizer.zero_grad()
        head(*checks.batch(step, torch.float64)[:2]).backward()
        optimizer.step()
    return {"head": head, "optimizer": optimizer}


def test_a_checkpoint_replaces_another_and_leaves_nothing_beside_it(tmp_path):
    parts = trained_whole("RowAdagrad")
    for _ in range(2):
        save_checkpoint(tmp_path / "newest", parts)
    assert [path.name for path in tmp_path.iterdir()] == ["newest"]


def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path):
    parts = trained_whole("RowAdagrad")
    with pytest.raises(FileNotFoundError, match="`folder` must hold a complete checkpoint"):
        load_checkpoint(tmp_path, parts)
    save_checkpoint(tmp_path / "newest", {"head": parts["head"]})
    with pytest.raises(ValueError, match=r"`parts` must be among those saved in .*, got 'optimizer'"):
        load_checkpoint(tmp_path / "newest", parts)


def test_the_weights_of_all_processes_are_one_file_of_whole_tables(tmp_path):
    # 4 processes: one of them has no class.
    expected = call_together(functools.partial(checks.weights_saved, folder=tmp_path), tmp_path, 4)[0]
    found = load_file(tmp_path / "model.safetensors")
    names = {"encoder.weight", "encoder.bias", "head.weight", "head.bias"}
    assert found.keys() == names
    assert_equal(found, {name: expected[name] for name in names})
    assert not list(tmp_path.glob("*partial*"))


def test_weights_of_one_process_replace_those_of_another_file(tmp_path):
    path = tmp_path / "new" / "weights.safetensors"
    head = make("systematic")
    for _ in range(2):
        save_weights(path, head)
        assert_equal(load_file(path), {"weight": head.weight.detach(), "bias": head.bias.detach()})
        with torch.no_grad():
            head.weight.add_(1)
    assert [found.name for found in path.parent.iterdir()] == ["weights.safetensors"]
