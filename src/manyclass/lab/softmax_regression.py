"""Training softmax regression by one method, beside exact training on the same minibatches."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import registry
from manyclass.heads import ClassHead, HierarchicalHead
from manyclass.lab.objectives import AdaptedImportance, TaylorInverse, UpperBound
from manyclass.lab.problem import DIM, NUM_CLASSES, NUM_EXAMPLES, K, Minibatches, Problem, paper_problem
from manyclass.objectives import (
    LogisticRanking,
    Objective,
)
from manyclass.samplers import Bernoulli, Exhaustive, Importance, Sampler, Systematic, WithExplicit
from manyclass.training import Callback, Training

MOMENTUM = 0.99
Head = ClassHead | HierarchicalHead


@dataclass(frozen=True)
class Method:
    """A way to train, in words that JSON can hold.

    Args:
        objective: a key of OBJECTIVES, "ranking", "Taylor 1/Z", "adapted importance" or "hierarchical".
        sampler: "exhaustive", "importance", "Bernoulli" or "systematic".
        k: classes drawn.
        power: of the class counts that weigh them; 0 is uniform.
        margin: of ranking; None: log(C - 1).
        group_size: how many examples share a draw; None: the batch.
        explicit: how many of the most frequent classes are explicit, or "batch": those of the minibatch.
        update: which rows learn, "scored" or "observed".
        learn_z: whether each datapoint has a log z to learn.
        draws: how many independent draws of k a step takes.
    """

    objective: str = "likelihood"
    sampler: str = "importance"
    k: int = K
    power: float = 1.0
    margin: float | None = None
    group_size: int | None = 1
    explicit: int | str | None = None
    update: str = "scored"
    learn_z: bool = False
    draws: int = 1


EXACT = Method(sampler="exhaustive")

# Objectives that need no more than their name, by the paper's names.
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "likelihood": registry.OBJECTIVES["likelihood"],
    "plain importance": registry.OBJECTIVES["plain_importance"],
    "subset softmax": registry.OBJECTIVES["subset_softmax"],
    "BlackOut": registry.OBJECTIVES["black_out"],
    "hinge": registry.OBJECTIVES["hinge_ranking"],
    "negative sampling": registry.OBJECTIVES["negative_sampling"],
    "NCE": registry.OBJECTIVES["noise_contrastive"],
    "bound": UpperBound,
}


def sampler_of(method: Method, problem: Problem) -> Sampler:
    """The sampler that a method names, over the problem's class counts."""
    sampler: Importance | Bernoulli | Systematic
    group_size, counts = method.group_size, problem.counts
    if method.sampler == "exhaustive":
        return Exhaustive(problem.num_classes)
    if method.sampler == "importance":
        sampler = Importance(counts, method.draws * method.k, power=method.power, group_size=group_size)
    elif method.sampler == "systematic":
        sampler = Systematic(counts, method.k, power=method.power, group_size=group_size)
    elif method.power == 0:
        share = torch.full((problem.num_classes,), method.k / problem.num_classes, dtype=torch.float64)
        sampler = Bernoulli.from_probabilities(share, group_size=group_size)
    else:
        sampler = Bernoulli(counts, method.k, group_size=group_size)
    if method.explicit is None:
        return sampler
    if method.explicit == "batch":
        return WithExplicit(sampler, "batch")
    return WithExplicit(sampler, sampler.heaviest(int(method.explicit)))


def objective_of(method: Method, sampler: Sampler) -> Objective:
    """The objective that a method names."""
    if method.objective == "ranking":
        return LogisticRanking(method.margin)
    if method.objective == "Taylor 1/Z":
        return TaylorInverse(method.draws)
    if method.objective == "adapted importance":
        assert isinstance(sampler, Importance)
        return AdaptedImportance(sampler)
    return OBJECTIVES[method.objective]()


def head_of(method: Method, problem: Problem) -> Head:
    """A head with class vectors of zero and no bias, as the paper's model has it."""
    if method.objective == "hierarchical":
        tree = HierarchicalHead(DIM, problem.num_classes, counts=problem.counts)
        nn.init.zeros_(tree.weight)
        # The flat model has no biases either.
        tree.bias.requires_grad_(False)
        return tree
    weight = nn.Parameter(torch.zeros(problem.num_classes, DIM))
    sampler = sampler_of(method, problem)
    return ClassHead(
        DIM,
        problem.num_classes,
        sampler=sampler,
        objective=objective_of(method, sampler),
        bias=False,
        update=method.update,
        weight=weight,
    )


@torch.no_grad()
def probabilities(head: Head, inputs: Tensor) -> Tensor:
    """[N, C], exactly."""
    if isinstance(head, HierarchicalHead):
        best = head.topk(inputs, head.num_classes)
        return torch.empty_like(best.log_prob).scatter_(1, best.ids, best.log_prob).exp()
    return (inputs @ head.weight.T).softmax(1)


@torch.no_grad()
def log_likelihood(head: Head, problem: Problem) -> float:
    """The mean over the training set, exactly."""
    exact_loss = head.exact_loss if isinstance(head, ClassHead) else head
    return -float(exact_loss(problem.inputs, problem.target))


def bias(p: Tensor, reference: Tensor) -> float:
    """The paper's measure: the log of the mean absolute difference of class probabilities."""
    difference = float((p - reference).abs_().mean(dtype=torch.float64))
    return math.log(difference) if difference > 0 else -math.inf


Measure = Callable[[int, Head], None]


class _At(Callback):
    """Measures after certain steps."""

    def __init__(self, steps: Sequence[int], head: Head, measure: Measure) -> None:
        self._steps, self._head, self._measure = frozenset(steps), head, measure

    def on_step(self, training: Training) -> None:
        if training.progress.step in self._steps:
            self._measure(training.progress.step, self._head)


def follow(
    problem: Problem, method: Method, measure: Measure, *, seed: int, rate: float, points: Sequence[int]
) -> Head:
    """Train by gradient descent with momentum to the last of the points, and measure at each of them.

    Raises:
        ValueError: the loss is no longer finite.
    """
    head = head_of(method, problem)
    log_z = nn.Parameter(torch.zeros(NUM_EXAMPLES)) if method.learn_z else None
    parameters = [*(p for p in head.parameters() if p.requires_grad), *([] if log_z is None else [log_z])]
    if 0 in points:
        measure(0, head)
    Training(
        head,
        Minibatches(problem, seed=seed, log_z=log_z),
        torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
        steps=max(points),
        callbacks=[_At(points, head, measure)],
        seed=seed,
    ).run()
    return head


# A process computes the cells of one seed one after the other; they share what exact training predicted.
@functools.lru_cache(maxsize=1)
def _exact(seed: int, num_classes: int, rate: float, points: tuple[int, ...]) -> dict[int, Tensor]:
    problem = paper_problem(seed, num_classes)
    kept: dict[int, Tensor] = {}
    follow(
        problem,
        EXACT,
        lambda step, head: kept.update({step: probabilities(head, problem.inputs)}),
        seed=seed,
        rate=rate,
        points=points,
    )
    return kept


def curve(
    *,
    method: Mapping[str, Any],
    seed: int,
    rate: float,
    exact_rate: float,
    points: list[int],
    num_classes: int = NUM_CLASSES,
) -> dict[str, Any]:
    """A cell: exact log likelihood and bias at each point, None from where the training diverged.

    Bias is against exact training at the same iteration, against the true model, and against that on fresh inputs.
    """
    problem = paper_problem(seed, num_classes)
    exact = _exact(seed, num_classes, exact_rate, tuple(points))
    found: dict[str, list[float | None]] = {
        name: [] for name in ("log_likelihood", "bias_exact", "bias_true", "bias_fresh")
    }

    def measure(step: int, head: Head) -> None:
        p = probabilities(head, problem.inputs)
        found["log_likelihood"].append(_number(log_likelihood(head, problem)))
        found["bias_exact"].append(_number(bias(p, exact[step])))
        found["bias_true"].append(_number(bias(p, problem.true_p)))
        found["bias_fresh"].append(_number(bias(probabilities(head, problem.fresh), problem.fresh_p)))

    diverged = False
    try:
        follow(problem, Method(**method), measure, seed=seed, rate=rate, points=points)
    except ValueError:
        diverged = True
        for values in found.values():
            values.extend([None] * (len(points) - len(values)))
    return {**found, "diverged": diverged}


def final(*, method: Mapping[str, Any], seed: int, rate: float, iterations: int) -> dict[str, Any]:
    """A cell: the exact log likelihood at the end; None where the training diverged."""
    problem = paper_problem(seed)
    try:
        head = follow(problem, Method(**method), lambda step, head: None, seed=seed, rate=rate, points=[iterations])
    except ValueError:
        return {"log_likelihood": None}
    return {"log_likelihood": _number(log_likelihood(head, problem))}


def settings(method: Method) -> dict[str, Any]:
    """A method as cells take it."""
    return asdict(method)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
