"""A head whose parameters are sharded by torch, on one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from manyclass import diagnose
from tests.uses.table import (
    CHANGING,
    EVERY,
    FEW,
    HIDDEN,
    SPARSE,
    STEPS,
    TARGET,
    UNSAMPLED,
    cells,
    differing,
    draws,
    follows,
    head_of,
    identical,
    loss_of,
    reads_vectors,
    state_of,
    train,
    trained,
    works_or_refuses,
)

# Torch shards neither sparse gradients nor the scalar that this objective learns.
UNSHARDED = (*SPARSE, "class, noise contrastive")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:`_get_pg_default_device`:UserWarning",
    "ignore:Multiple backends:UserWarning",
)


@pytest.fixture(scope="module", autouse=True)
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(head):
    return fully_shard(head, mesh=dist.init_device_mesh("cpu", (1,)))


def whole(parameter):
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()


@cells(without=UNSHARDED)
def test_a_sharded_head_trains_and_predicts_as_a_whole_one(cell):
    head, twin = sharded(head_of(cell)), head_of(cell)
    assert all(isinstance(parameter, DTensor) for parameter in head.parameters())
    losses, expected = (train(each, range(STEPS)) for each in (head, twin))
    assert identical(losses, expected)
    for ours, theirs in zip(head.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    # Rebuilds read the class vectors of the present step.
    if cell[0] not in UNSAMPLED:
        assert not differing(state_of(head), state_of(twin))
        # Between steps the class vectors of a sharded head are divided.
        assert reads_vectors(cell) or identical(draws(head), draws(twin))
    for k in (1, 5):
        ours, theirs = head.topk(HIDDEN, k), twin.topk(HIDDEN, k)
        assert torch.equal(ours.ids, theirs.ids)
        torch.testing.assert_close(ours.log_prob, theirs.log_prob)


@cells(FEW, without=(*UNSHARDED, *UNSAMPLED))
def test_the_exact_results_of_a_sharded_head_are_those_of_a_whole_one(cell):
    head, twin = sharded(trained(cell)), trained(cell)
    torch.testing.assert_close(head.exact_loss(HIDDEN, TARGET), twin.exact_loss(HIDDEN, TARGET))
    torch.testing.assert_close(head.log_z(HIDDEN), twin.log_z(HIDDEN))
    ids = torch.arange(5)
    torch.testing.assert_close(head.log_prob(HIDDEN, ids), twin.log_prob(HIDDEN, ids))
    assert diagnose(head, HIDDEN, TARGET, draws=2).rows_touched == diagnose(twin, HIDDEN, TARGET, draws=2).rows_touched


@cells(FEW, without=UNSHARDED)
def test_a_sharded_head_in_evaluation_gives_the_loss_of_a_whole_one(cell):
    head, twin = sharded(trained(cell)).eval(), trained(cell).eval()
    with torch.no_grad():
        assert torch.equal(loss_of(head, HIDDEN, 0), loss_of(twin, HIDDEN, 0))


@cells([("class, sparse", "learned, rebuilt"), ("hierarchical, sparse", "learned, rebuilt")])
def test_a_sharded_head_with_sparse_gradients_trains_or_refuses_in_one_sentence(cell):
    with works_or_refuses():
        train(sharded(head_of(cell)), range(2))


@cells(FEW, without=UNSHARDED)
def test_the_state_of_a_sharded_head_continues_in_a_whole_one(cell):
    options = StateDictOptions(full_state_dict=True)
    head, twin, other = sharded(head_of(cell)), head_of(cell), head_of(cell, seed=9)
    train(head, range(EVERY))
    train(twin, range(EVERY))
    set_model_state_dict(other, get_model_state_dict(head, options=options), options=options)
    follows(other, twin)


@cells(CHANGING)
def test_the_sampler_of_a_sharded_head_is_refreshed_and_copied_outside_of_forward(cell):
    head = sharded(head_of(cell))
    train(head, range(EVERY))
    head.sampler.refresh()
    twin = copy.deepcopy(head.sampler)
    twin.advance()
    assert identical(draws(head), draws(head))
    train(head, range(EVERY))
