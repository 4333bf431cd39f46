"""A state dict holds what cannot be derived, in plain tensors, and a head that loads it continues bit for bit."""

import io

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from manyclass import ClassCounts, ClassHead
from tests.uses.table import (
    ALL,
    CHANGING,
    EVERY,
    FEW,
    STEPS,
    UNSAMPLED,
    WEIGHTS,
    C,
    D,
    K,
    cells,
    draws,
    follows,
    head_of,
    identical,
    sampler_of,
    train,
    trained,
    works_or_refuses,
)

# Names that entries of a sampler's state may have; a table that draws are looked up in has none.
STATE_NAMES = {
    "centroids",
    "directions",
    "estimate",
    "explicit",
    "frequency",
    "labels",
    "levels",
    "likely_b",
    "line",
    "moment",
    "pending_centroids",
    "pending_directions",
    "pending_labels",
    "pending_levels",
    "pending_line",
    "pending_weights",
    "progress",
    "proposal",
    "rates",
    "raw",
    "weights",
}
MAX_STATE_BYTES_PER_CLASS = 64  # eight numbers of 64 bits


def weights_only(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state):
    return safetensors.torch.load(safetensors.torch.save({name: x.contiguous() for name, x in state.items()}))


@cells(ALL)
def test_a_loaded_head_trains_on_bit_for_bit(cell):
    head = trained(cell)
    other = head_of(cell, seed=9)
    state = head.state_dict()
    for through_file in (weights_only, through_safetensors):
        state = through_file(state)
    result = other.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    follows(other, head)


@pytest.mark.parametrize("steps", [1, EVERY + 1])
@cells(CHANGING)
def test_a_head_loaded_at_any_step_trains_on_bit_for_bit(cell, steps):
    head = trained(cell, steps)
    other = trained(cell, EVERY + 2, seed=9)
    other.load_state_dict(head.state_dict())
    follows(other, head, range(steps, steps + STEPS))


@cells()
def test_a_head_that_takes_over_the_tensors_of_a_state_trains_on_bit_for_bit(cell):
    head = trained(cell)
    state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    other = head_of(cell, seed=9)
    other.load_state_dict(state, assign=True)
    for name, parameter in other.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()
    follows(other, head)


@cells(ALL)
def test_a_state_holds_plain_tensors_of_bounded_size(cell):
    head = trained(cell)
    for name, tensor in head.state_dict().items():
        assert type(tensor) is torch.Tensor, name
        assert tensor.layout == torch.strided
        assert not tensor.requires_grad
    parameters = dict(head.named_parameters())
    held = sum(x.numel() * x.element_size() for name, x in head.state_dict().items() if name not in parameters)
    assert held <= MAX_STATE_BYTES_PER_CLASS * C + 8 * C * D


@cells(ALL, without=UNSAMPLED)
def test_the_state_of_a_sampler_holds_no_table(cell):
    state = trained(cell).sampler.state_dict()
    assert {name.rpartition(".")[2] for name in state} <= STATE_NAMES


@cells(ALL)
def test_a_sampler_registers_nothing_that_casts_averages_and_broadcasts_change(cell):
    head = trained(cell)
    floating = [name for name, buffer in head.named_buffers() if buffer.is_floating_point()]
    assert floating == []
    if cell[0] not in UNSAMPLED:
        assert [name for name, _ in head.sampler.named_buffers()] == []
        assert [name for name, _ in head.sampler.named_parameters()] == []


@cells(FEW)
def test_a_state_loads_twice_and_into_the_same_head(cell):
    head, twin = trained(cell), trained(cell)
    state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    train(head, range(EVERY, 2 * EVERY))
    head.load_state_dict(state)
    head.load_state_dict(head.state_dict())
    follows(head, twin)


@cells(FEW)
def test_a_state_under_another_prefix_loads(cell):
    head = trained(cell)
    model, other = (torch.nn.Sequential(each) for each in (head, head_of(cell, seed=9)))
    other.load_state_dict(model.state_dict())
    follows(other[0], head)


@cells(FEW)
def test_a_state_with_a_missing_or_an_unknown_entry_is_refused_when_strict(cell):
    head = trained(cell)
    state = head.state_dict()
    for name in state:
        rest = {other: tensor for other, tensor in state.items() if other != name}
        with pytest.raises(RuntimeError, match="Missing key"):
            head_of(cell).load_state_dict(rest)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        head_of(cell).load_state_dict({**state, "sampler.other": torch.zeros(1)})


@cells(FEW)
def test_the_state_functions_of_distributed_checkpoints_continue_bit_for_bit(cell):
    head = trained(cell)
    other = head_of(cell, seed=9)
    set_model_state_dict(other, get_model_state_dict(head))
    follows(other, head)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@cells(FEW)
def test_a_distributed_checkpoint_in_a_folder_continues_bit_for_bit(cell, tmp_path):
    head = trained(cell)
    dcp.save({"model": get_model_state_dict(head)}, checkpoint_id=tmp_path, no_dist=True)
    other = head_of(cell, seed=9)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(other, state["model"])
    follows(other, head)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@cells(FEW)
def test_a_distributed_checkpoint_turned_into_a_file_continues_bit_for_bit(cell, tmp_path):
    head = trained(cell)
    dcp.save(get_model_state_dict(head), checkpoint_id=tmp_path / "folder", no_dist=True)
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "file")
    other = head_of(cell, seed=9)
    other.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    follows(other, head)


def with_and_without_counts():
    return ClassHead(D, C, counts=WEIGHTS, k=K), ClassHead(D, C, k=K)


def test_a_head_without_counts_loads_the_state_of_one_with_counts():
    head, other = with_and_without_counts()
    train(head, range(EVERY))
    other.load_state_dict(head.state_dict())
    follows(other, head)


def test_a_head_with_counts_loads_the_state_of_one_without():
    other, head = with_and_without_counts()
    train(head, range(EVERY))
    other.load_state_dict(head.state_dict())
    follows(other, head)


@pytest.mark.parametrize("sampler", sorted({name for head, name in ALL if head == "class"}))
def test_counts_that_were_updated_are_loaded(sampler):
    cell = ("class", sampler)
    head, other = head_of(cell), head_of(cell, sampler=sampler_of(cell, WEIGHTS.flip(0)))
    if sampler in ("exhaustive", "set alone"):
        assert identical(draws(head), draws(other))
        return
    assert not identical(draws(head), draws(other))
    other.load_state_dict(head.state_dict())
    assert identical(draws(head), draws(other))
    counts = [module for module in other.modules() if isinstance(module, ClassCounts)]
    for each in counts:
        torch.testing.assert_close(each.frequency(), WEIGHTS / WEIGHTS.sum())


@cells(FEW)
def test_a_state_of_another_number_of_classes_is_refused_in_words(cell):
    head = trained(cell)
    state = {name: x[:-1] if x.dim() and len(x) == C else x for name, x in head.state_dict().items()}
    other = head_of(cell)
    changed = [name for name in state if state[name].shape != head.state_dict()[name].shape]
    if not changed:
        return
    with pytest.raises((RuntimeError, ValueError)) as caught:
        other.load_state_dict(state)
    assert len(str(caught.value)) < 2000


def test_the_check_of_refusals_rejects_a_page_of_text():
    with works_or_refuses():
        raise ValueError("`hidden` must have shape [..., 6], got [3]")
    with pytest.raises(AssertionError), works_or_refuses():
        raise RuntimeError("a page\nof text")
