"""The synthetic problem follows the paper's description."""

import torch

from manyclass.lab.problem import Minibatches, paper_problem


def test_the_same_seed_gives_the_same_problem():
    paper_problem.cache_clear()
    one = paper_problem(3, 50)
    paper_problem.cache_clear()
    other = paper_problem(3, 50)
    assert torch.equal(one.target, other.target)
    assert not torch.equal(one.target, paper_problem(4, 50).target)


def test_targets_follow_the_true_model():
    problem = paper_problem(0, 50)
    own = problem.true_p.gather(1, problem.target.unsqueeze(1)).double()
    # If targets are distributed as p, the mean of p(target) is that of Σ p²; its standard error is below 1/√N.
    expected = problem.true_p.double().square().sum(1).mean()
    assert abs(float(own.mean() - expected)) < 4 * float(own.std()) / len(own) ** 0.5


def test_minibatches_hold_every_example_once_and_are_shuffled_by_epoch():
    problem = paper_problem(0, 50)
    batches = Minibatches(problem, seed=1)
    inputs = torch.cat([batch[0] for batch in batches])
    assert len(batches) == 40
    assert torch.equal(inputs.sum(1).sort().values, problem.inputs.sum(1).sort().values)
    batches.set_epoch(1)
    assert not torch.equal(next(iter(batches))[0], inputs[:50])
