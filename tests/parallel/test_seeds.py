"""Over several seeds, two processes reach the likelihood of one process with the joint batch."""

import pytest
import torch

from tests.parallel.problem import held_out, trained
from tests.parallel.processes import run_together
from tests.parallel.seeds import SEEDS, STEPS

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_together("tests.parallel.seeds", tmp_path_factory.mktemp("seeds"))


# Not on every change: twenty trainings take two minutes.
@pytest.mark.machine
@pytest.mark.parametrize("optimiser", ["Adam", "RowAdagrad"])
def test_300_steps_on_two_ranks_reach_the_likelihood_of_the_joint_batch(results, optimiser):
    alone = torch.tensor([held_out(trained(optimiser, STEPS, seed=seed)) for seed in SEEDS])
    together = []
    for seed in SEEDS:
        (weights, estimate, likelihood), (others, other_estimate, _) = (rank[f"{optimiser} {seed}"] for rank in results)
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert torch.equal(estimate, other_estimate)
        together.append(likelihood)
    ranks = torch.tensor(together)
    for name, values in (("one process", alone), ("two ranks", ranks)):
        print(
            f"{optimiser}, {name}: {values.mean():.4f} ± {values.std():.4f}, {values.min():.4f} to {values.max():.4f}"
        )
    # The standard error of the difference is about 0.6 standard deviations.
    assert abs(ranks.mean() - alone.mean()) < 2 * alone.std()
