"""A head whose classes are divided among processes is the head it was: draws, losses, gradients, rows, results."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyclass import ClassHead, diagnose, optim
from manyclass.parallel import shard
from manyclass.samplers import Systematic
from tests.parallel import divided_checks as checks
from tests.parallel.divided import (
    CASES,
    DTYPES,
    FEW,
    SAMPLERS,
    B,
    C,
    D,
    K,
    batch,
    drawn,
    make,
    part,
    steps_of,
    train,
    weights,
)
from tests.parallel.processes import run_together

WORLDS = (2, 3, 4)
# torch 2.11 warns about every sparse gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function from a number of processes to their results, which are made when first asked for."""

    @functools.cache
    def found(world):
        return run_together("tests.parallel.divided_checks", tmp_path_factory.mktemp(f"ranks-{world}"), world)

    return found


@pytest.fixture(params=WORLDS)
def ranks(request, results):
    """Return a function from the name of a check to its results on all ranks."""

    def found(name):
        parts = [of_rank[name] for of_rank in results(request.param)]
        for result in parts:
            assert not isinstance(result, str), result
        return parts

    return found


@functools.cache
def alone(sampler, objective, optimiser, more, dtype):
    head = make(sampler, objective, dtype)
    losses, gradient = train(head, optimiser, steps_of(objective, more), more=more, dtype=dtype)
    return {"losses": losses, "gradient": gradient, "weight": head.weight.detach(), "bias": head.bias.detach()}


def test_steps_on_any_number_of_processes_are_those_of_one_head(ranks):
    parts = ranks("trainings")
    cases = set(CASES) if len(parts) == checks.WORLD_OF_ALL else {case for case in CASES if case[3]}
    assert {case[:4] for case in parts[0]} == cases
    assert {case[4] for case in parts[0]} == set(DTYPES)
    for case in parts[0]:
        expected, tolerance = alone(*case), DTYPES[case[-1]]
        found = {name: torch.cat([of_rank[case][name] for of_rank in parts]) for name in ("weight", "bias")}
        found["losses"] = torch.stack([of_rank[case]["losses"] for of_rank in parts]).mean(0)
        # DDP takes the mean of gradients over ranks.
        found["gradient"] = torch.cat([of_rank[case]["gradient"] for of_rank in parts]) / len(parts)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=lambda m, c=case: f"{c}: {m}")


def test_the_same_seed_draws_the_same_classes_with_the_same_kappa(ranks):
    parts = ranks("draws")
    for name in SAMPLERS:
        head = make(name)
        for seed in range(30):
            ids, log_kappa, known = drawn(head.sampler, seed)
            pieces = [of_rank[name][seed] for of_rank in parts]
            found_ids = torch.cat([piece[0] for piece in pieces], 1)
            found_kappa = torch.cat([piece[1] for piece in pieces], 1).exp()
            assert_same_slots(found_ids, found_kappa, ids, log_kappa.exp())
            for piece in pieces:
                assert (piece[2] is None) == (known is None)
                if known is not None:
                    torch.testing.assert_close(piece[2], known, rtol=0, atol=1e-12)


def assert_same_slots(ids, kappa, other_ids, other_kappa):
    """Raise unless the sum of κ over the slots of each class is the same for each example, and so are the slots."""
    for values in ((kappa, other_kappa), ((kappa > 0).double(), (other_kappa > 0).double())):
        sums = [
            torch.zeros(len(at), C, dtype=torch.float64).scatter_add_(1, at, value)
            for at, value in zip((ids, other_ids), values, strict=True)
        ]
        torch.testing.assert_close(*sums, rtol=1e-12, atol=0)


def test_ranks_may_have_few_classes_or_none(ranks):
    parts = ranks("few classes")
    torch.manual_seed(0)
    head = ClassHead(D, FEW, sampler=Systematic(weights(FEW), 3), dtype=torch.float64)
    hidden, target, _ = batch(0, torch.float64)
    torch.manual_seed(1)
    loss = head(hidden, target % FEW)
    loss.backward()
    assert [part[0] for part in parts] == {2: [3, 2], 3: [2, 2, 1], 4: [2, 2, 1, 0]}[len(parts)]
    assert sum(part[1] for part in parts) / len(parts) == pytest.approx(loss.item(), abs=1e-12)
    exact = head.exact_loss(hidden, target % FEW).item()
    assert sum(part[2] for part in parts) / len(parts) == pytest.approx(exact, abs=1e-12)
    # A rank without classes has no gradient of rows.
    rows = torch.cat([part[3] for part in parts if part[3] is not None])
    torch.testing.assert_close(rows, head.weight.grad, rtol=0, atol=1e-12)
    best = head.topk(hidden, 3)
    assert torch.equal(torch.cat([part[4] for part in parts]), best.ids)
    torch.testing.assert_close(torch.cat([part[5] for part in parts]), best.log_prob, rtol=0, atol=1e-12)


def test_exact_results_estimates_and_diagnoses_are_those_of_one_head(ranks):
    parts = ranks("results")
    head = make("systematic")
    hidden, target, more = batch(0, torch.float64)
    hidden.requires_grad_()
    exclude = more["exclude"]
    exact = head.exact_loss(hidden, target, exclude=exclude, weight=more["weight"])
    exact.backward()
    assert sum(part["exact"] for part in parts) / len(parts) == pytest.approx(exact.item(), abs=1e-12)

    def joined(name):
        return torch.cat([part[name] for part in parts])

    def same(found, expected):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-11)

    same(joined("gradient") / len(parts), hidden.grad)
    same(joined("rows"), head.weight.grad)
    same(joined("none"), head.exact_loss(hidden, target, reduction="none"))
    sampled = head(hidden, target, reduction="sum", generator=torch.Generator().manual_seed(1))
    assert sum(part["sum"] for part in parts) == pytest.approx(sampled.item(), abs=1e-11)
    same(joined("log z"), head.log_z(hidden))
    for rank, found in enumerate(parts):
        own, ids = part(rank, len(parts)), torch.arange(C)[:: 2 + rank]
        same(found["scores"], head.scores(hidden[own], ids))
        same(found["log prob"], head.log_prob(hidden[own], ids))
        best = head.topk(hidden[own], 4, exclude=exclude[own])
        assert torch.equal(found["top"].ids, best.ids)
        same(found["top"].log_prob, best.log_prob)
    torch.manual_seed(2)
    # exact_loss above drew nothing, so the estimate is the first draw of the seed.
    generator = torch.Generator().manual_seed(1)
    head(hidden, target, generator=generator)
    diagnosis = diagnose(head, hidden, target, exclude=exclude, draws=3)
    for found in parts:
        for name, value in vars(diagnosis).items():
            assert vars(found["diagnosis"])[name] == pytest.approx(value, abs=1e-9), name


def test_the_bytes_of_a_step_do_not_depend_on_the_number_of_classes_and_are_those_predicted(ranks):
    parts = ranks("traffic")
    world = len(parts)
    largest = max(len(range(B)[part(rank, world)]) for rank in range(world))
    for found in parts:
        few, many = found.values()
        assert few == many
        # Float32 hidden vectors and int64 targets, one offset, the target's scores and two sums of each example, and
        # in the backward pass the gradients of losses and of hidden vectors.
        assert few == {
            "gather": largest * (4 * D + 8) + 4 * B + 4 * largest,
            "uniform": 8,
            "reduce": 4 * B + 4,
            "scatter": 4 * largest * world * D,
        }


def test_an_encoder_trains_under_ddp_and_fully_shard_as_on_one_process(ranks):
    model = checks.Model(make("learned"))
    encoder, weight = checks.trained_together(model, model, 0, 1)
    for name in ("data parallel", "fully sharded"):
        parts = ranks(name)
        torch.testing.assert_close(torch.cat([found[1] for found in parts]), weight, rtol=0, atol=1e-11)
        for found in parts:
            for own, expected in zip(found[0], encoder, strict=True):
                torch.testing.assert_close(own, expected, rtol=0, atol=1e-11)


REFUSALS = {
    "dim": "ValueError: `dim` must be a dimension of the mesh, 'classes', got 'rows'",
    "number of dim": "ValueError: `dim` must be a dimension of the mesh, 'classes', got 1",
    "mesh": "TypeError: `mesh` must be a DeviceMesh, got int",
    "classes": "ValueError: `head` must be the same on all ranks, got other num_classes: 53 on rank 0, 54 on rank 1",
    "counts": "ValueError: `head` must be the same on all ranks, got other digest of counts: ",
    "dtype": "ValueError: `head` must be the same on all ranks, got other dtype: torch.float32 on rank 0,",
    "release": "ValueError: `head` must be the same on all ranks, got other release of manyclass: ",
    "kind": "TypeError: `head` must be a ClassHead, got a HierarchicalHead",
    "sampler": "TypeError: `sampler` must be one whose classes can be divided among processes",
    "bernoulli": "TypeError: `sampler` must be one whose classes can be divided among processes",
    "probes": "ValueError: `probes` must be 0 if classes are divided among processes, got 2",
    "objective": "ValueError: `head.objective` must have one of the two forms, got BlackOut()",
    "tied": "ValueError: `head` must not share its class vectors with an embedding",
    "another sampler": "ValueError: `sampler` must be chosen before the classes are divided",
    "other samplers": "ValueError: `head` must be the same on all ranks, got other sampler: ",
    "other k": "ValueError: `head` must be the same on all ranks, got other options of the sampler: ",
    "learned z": "ValueError: `head.objective` must have no parameters that learn",
    "twice": "ValueError: `head` must be whole, got one that is divided among",
    "optimiser": "TypeError: `parts` must have a RowSGD, RowAdagrad or RowAdam for rows that are divided",
    "resize": "ValueError: `head` must be whole to be resized",
    "unprepared": "RuntimeError: a model with a divided head must be given to DistributedDataParallel as",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_every_rank_refuses_a_wrong_set_up_in_one_sentence(ranks, name):
    for found in ranks("refusals"):
        assert found[name].startswith(REFUSALS[name])
        assert "\n" not in found[name]


def test_if_one_rank_refuses_its_arguments_the_others_name_it_and_go_on(ranks):
    for rank, found in enumerate(ranks("refusals")):
        if rank == 1:
            assert found["target"].startswith("ValueError: `target` must lie in [0, 53), got ")
        else:
            assert found["target"].startswith("RuntimeError: the arguments of the head were refused on rank 1")
        assert found["kind on a rank"].startswith(
            "ValueError: `head` was refused on rank 0: TypeError: `head` must be a ClassHead, got a ScorerHead"
            if rank
            else "TypeError: `head` must be a ClassHead, got a ScorerHead"
        )
        assert found["after it"] == "no error"


def test_the_default_sampler_decides_the_same_on_all_ranks(ranks):
    first, *others = ranks("default head")
    assert first[0]
    for other in others:
        assert other[:3] == first[:3]


def test_all_ranks_probe_at_the_same_steps(ranks):
    first, *others = ranks("probes")
    assert [state[2] > 0 for state in first] == [True, True]
    assert all(other == first for other in others)


def test_given_log_z_have_the_gradient_that_they_have_in_one_head(ranks):
    parts = ranks("normalisers")
    head = make("systematic", "noise contrastive")
    hidden, target, _ = batch(0, torch.float64)
    log_z = torch.linspace(0, 1, B, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    loss = head(hidden, target, log_z=log_z)
    loss.backward()
    assert sum(found[0] for found in parts) / len(parts) == pytest.approx(loss.item(), abs=1e-12)
    gradient = torch.cat([found[1] for found in parts]) / len(parts)
    torch.testing.assert_close(gradient, log_z.grad, rtol=0, atol=1e-12)


def test_rows_that_are_not_scored_do_not_move_by_momentum(ranks):
    head = make("importance")
    optimizer = optim.RowAdam(list(head.parameters(recurse=False)), 0.1)
    expected = checks.adam_steps(head, optimizer, slice(None), 0)
    found = torch.cat(ranks("momentum"))
    # Adam divides by the root of a mean square: a rounding of a gradient near 0 counts.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_copy_of_a_divided_head_is_one_and_a_pickle_is_refused(ranks):
    for (loss, of_copy), marked, error in ranks("copies"):
        assert loss == of_copy
        assert marked
        assert error.startswith("TypeError: a head whose classes are divided among processes cannot be pickled")


def test_streamed_counts_raise_the_probability_of_a_class_on_all_ranks(ranks):
    for log_kappa, certain in ranks("streamed counts"):
        assert (log_kappa == 0).all()
        assert len(certain) == 0 or certain.tolist() == [7]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SAMPLERS)
def test_on_one_process_a_divided_head_is_the_head_it_was(mesh, name):
    expected = alone(name, "likelihood", "RowAdagrad", False, torch.float64)
    head = shard(make(name), mesh)
    losses, _ = train(head, "RowAdagrad", 20, more=False, dtype=torch.float64)
    torch.testing.assert_close(losses, expected["losses"], rtol=0, atol=1e-12)
    torch.testing.assert_close(head.weight.detach(), expected["weight"], rtol=0, atol=1e-12)


def test_a_head_without_values_gets_rows_of_its_own(mesh):
    head = ClassHead(D, 1000, sampler=Systematic(torch.ones(1000), 16), device="meta")
    head = shard(head, mesh)
    assert head.weight.device.type == "cpu"
    assert head.weight.abs().max() <= D**-0.5
    assert head.weight.std() > 0.5 * D**-0.5 / 3**0.5


def test_dividing_needs_a_process_group():
    head = ClassHead(D, C, sampler=Systematic(weights(), K))
    with pytest.raises(RuntimeError, match=r"torch\.distributed must be initialised before `shard`"):
        shard(head, None)
