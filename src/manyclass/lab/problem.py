"""The paper's synthetic problem: softmax regression on data sampled from a softmax model."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass.counts import ClassCounts

NUM_EXAMPLES, DIM, NUM_CLASSES, BATCH_SIZE, K = 2000, 100, 1000, 50, 20


@dataclass(frozen=True)
class Problem:
    """Inputs [N, D], targets [N], the true class vectors [C, D] and fresh inputs from the same distribution."""

    inputs: Tensor
    target: Tensor
    weight: Tensor
    fresh: Tensor

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return self.weight.shape[0]

    @functools.cached_property
    def counts(self) -> ClassCounts:
        """Class counts of the targets."""
        return ClassCounts.from_targets(self.target, self.num_classes)

    @functools.cached_property
    def true_p(self) -> Tensor:
        """The true model's probabilities [N, C] for the inputs."""
        return (self.inputs @ self.weight.T).softmax(1)

    @functools.cached_property
    def fresh_p(self) -> Tensor:
        """The true model's probabilities [N, C] for the fresh inputs."""
        return (self.fresh @ self.weight.T).softmax(1)


# A worker computes the cells of one problem one after the other.
@functools.lru_cache(maxsize=2)
def paper_problem(seed: int, num_classes: int = NUM_CLASSES) -> Problem:
    """Draw class vectors and inputs from N(0, 1), and targets from the softmax of their products."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_classes, DIM, generator=generator)
    inputs, fresh = (torch.randn(NUM_EXAMPLES, DIM, generator=generator) for _ in range(2))
    # The argmax of scores plus Gumbel noise follows the softmax; the clamp keeps the logarithm of 0 out.
    uniform = torch.rand(NUM_EXAMPLES, num_classes, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    target = ((inputs @ weight.T).double() - uniform.log().neg().log()).argmax(1)
    return Problem(inputs, target, weight, fresh)


class Minibatches:
    """Batches in an order fixed by seed and epoch, so that every method sees the same ones.

    Args:
        problem: the source of the examples.
        seed: seed of the order.
        log_z: parameter [N] with one log z per example, for objectives that learn it; its rows join each batch.
    """

    def __init__(self, problem: Problem, *, seed: int, log_z: Tensor | None = None) -> None:
        self._problem, self._seed, self._log_z = problem, seed, log_z
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle for this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return NUM_EXAMPLES // BATCH_SIZE

    def __iter__(self) -> Iterator[tuple[object, ...]]:
        generator = torch.Generator().manual_seed(100_003 * self._seed + self._epoch)
        for rows in torch.randperm(NUM_EXAMPLES, generator=generator).split(BATCH_SIZE):
            batch = self._problem.inputs[rows], self._problem.target[rows]
            yield batch if self._log_z is None else (*batch, {"log_z": self._log_z[rows]})
