"""Trains softmax regression by one method, and compares it with exact training on the same minibatches."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyclass import registry
from manyclass.heads import ClassHead, HierarchicalHead
from manyclass.lab.objectives import AdaptedImportance, TaylorInverse, UpperBound
from manyclass.lab.problem import DIM, NUM_CLASSES, NUM_EXAMPLES, K, Minibatches, Problem, paper_problem
from manyclass.objectives import LogisticRanking, Objective
from manyclass.samplers import Bernoulli, Exhaustive, Importance, Sampler, Systematic, WithExplicit
from manyclass.training import Callback, Training

MOMENTUM = 0.99
Head = ClassHead | HierarchicalHead


@dataclass(frozen=True)
class Method:
    """Training method, in JSON-serialisable values.

    Args:
        objective: a key of OBJECTIVES, "ranking", "Taylor 1/Z", "adapted importance" or "hierarchical".
        sampler: "exhaustive", "importance", "Bernoulli" or "systematic".
        k: classes drawn.
        power: exponent of the class counts in the sampling weights; 0 is uniform.
        margin: margin of ranking; None means log(C - 1).
        group_size: number of examples that share a draw; None means the whole batch.
        explicit: number of most frequent classes that are explicit, or "batch" for the minibatch's classes.
        update: rows to update, "scored" or "observed".
        learn_z: True to learn a log z per example.
        draws: independent draws of k classes per step.
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

# Objectives without arguments, by the paper's names.
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
    """Return the method's sampler over the problem's class counts."""
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
    """Return the method's objective."""
    if method.objective == "ranking":
        return LogisticRanking(method.margin)
    if method.objective == "Taylor 1/Z":
        return TaylorInverse(method.draws)
    if method.objective == "adapted importance":
        assert isinstance(sampler, Importance)
        return AdaptedImportance(sampler)
    return OBJECTIVES[method.objective]()


def build_head(method: Method, problem: Problem) -> Head:
    """Build a head with zero class vectors and no bias, the paper's model."""
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
    """Return the exact class probabilities [N, C]."""
    if isinstance(head, HierarchicalHead):
        best = head.topk(inputs, head.num_classes)
        return torch.empty_like(best.log_prob).scatter_(1, best.ids, best.log_prob).exp()
    return (inputs @ head.weight.T).softmax(1)


@torch.no_grad()
def log_likelihood(head: Head, problem: Problem) -> float:
    """Return the exact mean log likelihood of the training set."""
    exact_loss = head.exact_loss if isinstance(head, ClassHead) else head
    return -float(exact_loss(problem.inputs, problem.target))


def bias(p: Tensor, reference: Tensor) -> float:
    """Return the paper's bias: the log of the mean absolute difference of class probabilities."""
    difference = float((p - reference).abs_().mean(dtype=torch.float64))
    return math.log(difference) if difference > 0 else -math.inf


Measure = Callable[[int, Head], None]


def _do_nothing(step: int, head: Head) -> None:
    pass


class _MeasureAtSteps(Callback):
    """Callback that measures the head after the given steps."""

    def __init__(self, steps: Sequence[int], head: Head, measure: Measure) -> None:
        self._steps, self._head, self._measure = frozenset(steps), head, measure

    def on_step(self, training: Training) -> None:
        if training.progress.step in self._steps:
            self._measure(training.progress.step, self._head)


def train_method(
    problem: Problem, method: Method, *, seed: int, rate: float, points: Sequence[int], measure: Measure = _do_nothing
) -> Head:
    """Train by gradient descent with momentum up to step max(points), and measure after each step in `points`.

    Raises:
        ValueError: a loss is not finite.
    """
    head = build_head(method, problem)
    log_z = nn.Parameter(torch.zeros(NUM_EXAMPLES)) if method.learn_z else None
    parameters = [*(p for p in head.parameters() if p.requires_grad), *([] if log_z is None else [log_z])]
    if 0 in points:
        measure(0, head)
    Training(
        head,
        Minibatches(problem, seed=seed, log_z=log_z),
        torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM),
        steps=max(points),
        callbacks=[_MeasureAtSteps(points, head, measure)],
        seed=seed,
    ).run()
    return head


# A worker computes the cells of one seed one after the other, so one entry lets them share exact training.
@functools.lru_cache(maxsize=1)
def _exact_probabilities(seed: int, num_classes: int, rate: float, points: tuple[int, ...]) -> dict[int, Tensor]:
    problem = paper_problem(seed, num_classes)
    found: dict[int, Tensor] = {}

    def measure(step: int, head: Head) -> None:
        found[step] = probabilities(head, problem.inputs)

    train_method(problem, EXACT, seed=seed, rate=rate, points=points, measure=measure)
    return found


def training_curve(
    *,
    method: Mapping[str, Any],
    seed: int,
    rate: float,
    exact_rate: float,
    points: list[int],
    num_classes: int = NUM_CLASSES,
) -> dict[str, Any]:
    """Compute a cell: exact log likelihood and bias at each point, None after the training diverged.

    Bias is against exact training at the same iteration, and against the true model on training and fresh inputs.
    """
    problem = paper_problem(seed, num_classes)
    exact = _exact_probabilities(seed, num_classes, exact_rate, tuple(points))
    found: dict[str, list[float | None]] = {
        name: [] for name in ("log_likelihood", "bias_exact", "bias_true", "bias_fresh")
    }

    def measure(step: int, head: Head) -> None:
        p = probabilities(head, problem.inputs)
        found["log_likelihood"].append(_finite_or_none(log_likelihood(head, problem)))
        found["bias_exact"].append(_finite_or_none(bias(p, exact[step])))
        found["bias_true"].append(_finite_or_none(bias(p, problem.true_p)))
        found["bias_fresh"].append(_finite_or_none(bias(probabilities(head, problem.fresh), problem.fresh_p)))

    diverged = False
    try:
        train_method(problem, Method(**method), seed=seed, rate=rate, points=points, measure=measure)
    except ValueError:
        diverged = True
        for values in found.values():
            values.extend([None] * (len(points) - len(values)))
    return {**found, "diverged": diverged}


def final_log_likelihood(*, method: Mapping[str, Any], seed: int, rate: float, iterations: int) -> dict[str, Any]:
    """Compute a cell: the exact log likelihood after the last iteration, None if the training diverged."""
    problem = paper_problem(seed)
    try:
        head = train_method(problem, Method(**method), seed=seed, rate=rate, points=[iterations])
    except ValueError:
        return {"log_likelihood": None}
    return {"log_likelihood": _finite_or_none(log_likelihood(head, problem))}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
