"""The paper's problem: softmax regression on data drawn from the model itself."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manyclass.counts import ClassCounts

NUM_EXAMPLES, DIM, NUM_CLASSES, BATCH, K = 2000, 100, 1000, 50, 20


@dataclass(frozen=True)
class Problem:
    """Inputs [N, D] and targets [N] of a true model with class vectors [C, D], and fresh inputs from the same law."""

    inputs: Tensor
    target: Tensor
    weight: Tensor
    fresh: Tensor

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    @functools.cached_property
    def counts(self) -> ClassCounts:
        return ClassCounts.from_targets(self.target, self.num_classes)

    @functools.cached_property
    def true_p(self) -> Tensor:
        """[N, C]: the true model's probabilities for the inputs."""
        return (self.inputs @ self.weight.T).softmax(1)

    @functools.cached_property
    def fresh_p(self) -> Tensor:
        """[N, C]: the true model's probabilities for the fresh inputs."""
        return (self.fresh @ self.weight.T).softmax(1)


# A process meets the cells of one problem together.
@functools.lru_cache(maxsize=2)
def paper_problem(seed: int, num_classes: int = NUM_CLASSES) -> Problem:
    """Weights and inputs from N(0, 1), targets from the softmax of their products."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_classes, DIM, generator=generator)
    inputs, fresh = (torch.randn(NUM_EXAMPLES, DIM, generator=generator) for _ in range(2))
    # The class of the largest score plus Gumbel noise has the softmax's law; one uniform number is never exactly 0.
    uniform = torch.rand(NUM_EXAMPLES, num_classes, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    target = ((inputs @ weight.T).double() - uniform.log().neg().log()).argmax(1)
    return Problem(inputs, target, weight, fresh)


class Minibatches:
    """Batches in an order that follows from the seed and the epoch, so that every method sees the same ones.

    Args:
        problem: whose examples they are.
        seed: of the order.
        log_z: a parameter [N] to hand each example's own of, for objectives that learn a z of each datapoint.
    """

    def __init__(self, problem: Problem, *, seed: int, log_z: Tensor | None = None) -> None:
        self._problem, self._seed, self._log_z = problem, seed, log_z
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return NUM_EXAMPLES // BATCH

    def __iter__(self) -> Iterator[tuple[object, ...]]:
        generator = torch.Generator().manual_seed(100_003 * self._seed + self._epoch)
        for rows in torch.randperm(NUM_EXAMPLES, generator=generator).split(BATCH):
            batch = self._problem.inputs[rows], self._problem.target[rows]
            yield batch if self._log_z is None else (*batch, {"log_z": self._log_z[rows]})
