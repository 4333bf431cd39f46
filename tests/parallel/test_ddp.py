"""Models train under torch's DistributedDataParallel on two processes as on one, with dense and sparse gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from manyclass.parallel import prepare
from tests import tables
from tests.parallel import checks
from tests.parallel.problem import OPTIMISERS, Model, default_head, held_out, optimisers_of, train, trained
from tests.parallel.processes import run_together

# torch 2.11 warns about every sparse gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_together("tests.parallel.checks", tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def ranks(results):
    """Return a function from the name of a check to its results on both ranks."""

    def found(name):
        pair = [rank[name] for rank in results]
        for result in pair:
            assert not isinstance(result, str), result
        return pair

    return found


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_same(first, second):
    """Raise unless two dicts of tensors are equal bit for bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def assert_mean(found, *by_rank, tolerance=1e-6):
    """Raise unless gradients are the mean over ranks; one that is missing on a rank counts as zeros."""
    for name in set().union(*by_rank):
        gradients = [gradients[name] for gradients in by_rank if name in gradients]
        expected = sum(gradients) / len(by_rank)
        torch.testing.assert_close(found[name].to(expected.dtype), expected, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["dense", "sparse", *(name for name in OPTIMISERS if name not in ("Adam", "RowAdagrad"))]
)
def test_weights_samplers_and_gradients_are_equal_on_both_ranks_bit_for_bit(ranks, name):
    (first, estimate, likelihood), (second, other_estimate, other_likelihood) = ranks(name)
    assert_same(first, second)
    assert torch.equal(estimate, other_estimate)
    assert likelihood == other_likelihood


@pytest.mark.parametrize(("name", "optimiser"), [("dense", "Adam"), ("sparse", "RowAdagrad")])
def test_two_ranks_reach_the_likelihood_of_one_process_with_the_joint_batch(ranks, name, optimiser):
    alone = held_out(trained(optimiser, checks.STEPS, seed=1))
    gained = alone - held_out(Model(default_head()))
    assert gained > 1
    # Seeds differ by up to a tenth of the gain; `test_seeds.py` compares means over several.
    assert abs(ranks(name)[0][2] - alone) < 0.2 * gained


def test_samplers_learn_together_and_take_the_same_decisions(ranks):
    first, second = ranks("samplers")
    for name, (estimate, k, decided) in first.items():
        other_estimate, other_k, other_decided = second[name]
        assert torch.equal(estimate, other_estimate), name
        assert (k, decided) == (other_k, other_decided), name
    for name in ("budget", "all", "automatic", "automatic, timed"):
        decisions, *_ = first[name][2]
        # Measured times differ from one run to the next.
        assert len(decisions) == 1 or name == "automatic, timed"
        assert decisions
        assert first[name][1] != first["explicit"][1]
    # The moment and the sketch that is renewed from it.
    moment, directions = first["tailored"][0].chunk(2)
    assert moment.any()
    assert directions.any(0).sum() == 2


def test_every_sampler_trains_with_dense_and_sparse_gradients_and_with_a_scorer(ranks):
    first, second = ranks("every sampler")
    assert len(first) == 3 * len(tables.SAMPLERS)
    for name, weights in first.items():
        assert_same(weights, second[name])


def test_sparse_gradients_are_means_over_ranks_with_unequal_numbers_of_rows(ranks):
    (first, sparse), (second, _) = ranks("unequal rows")
    assert_same(first, second)
    assert all(sparse)
    expected = [checks.local_gradients(rank) for rank in range(2)]
    assert_mean({name: first[f"{name}.grad"] for name in expected[0]}, *expected)


def test_no_sync_accumulates_without_an_exchange_and_the_next_step_exchanges_all(ranks):
    found = ranks("no_sync")
    passes = [[*checks.passes_of(rank, 1)] for rank in range(2)]
    expected = [checks.local_gradients(rank, passes=[*passes[rank], 5]) for rank in range(2)]
    for rank, (local, exchanged) in enumerate(found):
        assert_mean(local, checks.local_gradients(rank, passes=passes[rank]))
        assert_mean(exchanged, *expected)


def test_gradients_accumulate_over_synchronised_passes_and_their_rows_do_not_multiply(ranks):
    expected = [checks.local_gradients(rank, passes=range(3)) for rank in range(2)]
    for found, rows in ranks("accumulation"):
        assert_mean(found, *expected)
        assert rows <= 2 * checks.C


def test_samplers_learn_from_synchronised_passes_alone_of_which_ranks_have_equal_numbers(ranks):
    (first, probe), (second, other_probe) = ranks("learning")
    assert torch.equal(first, second)
    assert probe == other_probe
    steps, next_step, number, *_ = probe
    assert (steps, next_step, number) == (6, 7, 6)


def test_a_rank_without_a_gradient_does_not_hold_up_the_other(ranks):
    expected = [checks.local_gradients(0), checks.local_gradients(1, uses_head=False)]
    for found in ranks("missing gradient"):
        assert_mean(found, *expected)


def test_a_gradient_that_is_dense_on_one_rank_becomes_dense_on_both(ranks):
    expected = [checks.local_gradients(0, exact=True), checks.local_gradients(1)]
    for found, sparse in ranks("mixed layouts"):
        assert_mean(found, *expected)
        assert not sparse


def test_gradients_in_half_precision_are_exchanged(ranks):
    expected = [checks.local_gradients(rank) for rank in range(2)]
    first, second = ranks("half precision")
    assert_same(first, second)
    assert first["head.weight"].dtype == torch.bfloat16
    assert_mean(first, *expected, tolerance=0.01)


def test_gradients_that_compiled_code_adds_are_exchanged(ranks):
    expected = [checks.local_gradients(rank) for rank in range(2)]
    for found in ranks("compiled"):
        assert_mean({name.replace("._orig_mod", ""): value for name, value in found.items()}, *expected)


def test_a_tied_embedding_is_averaged_once(ranks):
    (first, sparse), (second, _) = ranks("tied")
    assert_same(first, second)
    assert sparse
    assert first["head.weight"] is not None
    assert first["encoder.0.weight.grad"].any(1).sum() == checks.C


def test_sparse_trees_and_bags_of_features_are_averaged_too(ranks):
    first, second = ranks("other tables")
    for one, other in zip(first[:2], second[:2], strict=True):
        assert_same(one, other)
    assert first[2]
    assert first[1]["encoder.layers.0.weight.grad"].any(1).nonzero().ravel().tolist() == [0, 1, 2, 3]


def test_misuse_is_refused_in_one_sentence(ranks):
    for found in ranks("refusals"):
        for name, kind in {"head": "ClassHead", "tree": "HierarchicalHead", "bag": "FeatureBag"}.items():
            assert (
                f"sparse {kind} must be given to DistributedDataParallel as DistributedDataParallel(manyclass"
                in found[name]
            )
        assert "manyclass.parallel.prepare(model)" in found["prepared inside"]
        assert "must be prepared again, since it is a copy" in found["copy"]
        assert "must be prepared again, since it is a copy" in found["pickle"]
        assert "`process_group` of `prepare` must be that of DDP" in found["group"]
        assert found["only sparse"].startswith(
            "ValueError: `model` must have a trainable parameter with dense gradients that is not divided"
        )


def test_preparing_a_model_twice_is_preparing_it_once(ranks):
    expected = [checks.local_gradients(rank) for rank in range(2)]
    for found in ranks("prepared twice"):
        assert_mean(found, *expected)


def test_a_moving_average_of_a_prepared_model_is_a_model(ranks):
    (works, first), (_, second) = ranks("moving average")
    assert works
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["resumed dense", "resumed sparse"])
def test_a_resumed_training_equals_an_unbroken_one_also_if_rank_0_alone_loads_the_model(ranks, name):
    for unbroken, resumed, resumed_from_rank_0 in ranks(name):
        assert_same(unbroken, resumed)
        assert_same(unbroken, resumed_from_rank_0)


@pytest.mark.parametrize("optimiser", ["Adam", "RowAdagrad"])
def test_one_rank_trains_as_without_ranks(one_process, optimiser):
    alone = trained(optimiser, 5)
    torch.manual_seed(0)
    model = Model(default_head(sparse=optimiser != "Adam"))
    optimisers = optimisers_of(model, optimiser)
    train(DistributedDataParallel(prepare(model)), optimisers, 5)
    assert_same(checks.contents(alone), checks.contents(model))


def test_a_copy_of_a_prepared_dense_model_needs_no_preparation(one_process):
    model = DistributedDataParallel(copy.deepcopy(prepare(Model(default_head()))))
    model(*checks.part(0)).backward()
    assert model.module.head.weight.grad is not None


@pytest.mark.parametrize("optimiser", ["Adam", "RowAdagrad"])
def test_ranks_that_may_end_at_different_steps_are_refused(one_process, optimiser):
    model = DistributedDataParallel(prepare(Model(default_head(sparse=optimiser != "Adam"))))
    with pytest.raises(RuntimeError, match=r"`join\(\)` must not be used"), model.join():
        model(*checks.part(0))


def test_preparing_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"torch\.distributed must be initialised before `prepare`"):
        prepare(Model(default_head(sparse=True)))
