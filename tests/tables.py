"""Tables of every sampler and objective, for the tests that hold for all of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from manyclass.objectives import (
    BlackOut,
    HingeRanking,
    Likelihood,
    LogisticRanking,
    NegativeSampling,
    NoiseContrastive,
    Objective,
    PlainImportance,
    SubsetSoftmax,
)
from manyclass.samplers import (
    Automatic,
    Bernoulli,
    Budget,
    Clustered,
    Costs,
    Exhaustive,
    Importance,
    InBatch,
    Learned,
    Sampler,
    Systematic,
    Tailored,
    WithExplicit,
)

# Functions of positive weights, k and a group size.
DRAWING: dict[str, Callable[[Tensor, int, int | None], Sampler]] = {
    "importance": lambda w, k, g: Importance(w, k, group_size=g),
    "systematic": lambda w, k, g: Systematic(w, k, group_size=g),
    "bernoulli": lambda w, k, g: Bernoulli(w, k, group_size=g),
}

# Variants of these designs whose outcomes can be enumerated too.
DESIGNS: dict[str, Callable[[Tensor, int, int | None], Sampler]] = {
    **DRAWING,
    "systematic, stratified": lambda w, k, g: Systematic(w, k, stratified=True, group_size=g),
    "systematic, heaviest first": lambda w, k, g: Systematic(w, k, order="frequency", group_size=g),
    "systematic, random order": lambda w, k, g: Systematic(w, k, order="random", group_size=g),
    "proportional bernoulli": lambda w, k, g: Bernoulli.proportional(w, k, group_size=g),
}

SAMPLERS: dict[str, Callable[[Tensor, int, int | None], Sampler]] = {
    **DESIGNS,
    "systematic, given order": lambda w, k, g: Systematic(w, k, order=torch.arange(len(w)).flip(0), group_size=g),
    "systematic, order of clusters": lambda w, k, g: Systematic(w, k, order="cluster", group_size=g),
    "exhaustive": lambda w, k, g: Exhaustive(len(w)),
    "bernoulli, given probabilities": lambda w, k, g: Bernoulli.from_probabilities(
        (w / w.max()).clamp(min=1e-3), group_size=g
    ),
    "minibatch explicit": lambda w, k, g: WithExplicit(Importance(w, k, group_size=g), "batch"),
    "fixed set explicit": lambda w, k, g: WithExplicit(Systematic(w, k, group_size=g), torch.tensor([0, len(w) - 1])),
    "budget": lambda w, k, g: WithExplicit.budget(Bernoulli(w, k, group_size=g), min(k + 1, len(w))),
    "budget of error": lambda w, k, g: Budget(Systematic(w, k, group_size=g), 0.1),
    "minibatch and fixed set explicit": lambda w, k, g: WithExplicit(
        WithExplicit(Importance(w, k, group_size=g), torch.tensor([1])), "batch"
    ),
    "clustered": lambda w, k, g: Clustered(w, k, group_size=g or 4),
    "in batch": lambda w, k, g: InBatch(w, k),
    "tailored": lambda w, k, g: Tailored(w, k, group_size=g),
    "tailored, nearest explicit": lambda w, k, g: Tailored(w, k, group_size=g, nearest=2),
    "learned": lambda w, k, g: Learned(w, k, group_size=g),
    # With given costs all decisions follow from the seed.
    "automatic": lambda w, k, g: Automatic(w, least=k, costs=Costs(10.0, 1.0, 2.0, 0.01)),
    "set alone": lambda w, k, g: WithExplicit(None, torch.arange(k), num_classes=len(w)),
}

# Each objective, its name in tests/reference.py, and the arguments it needs there.
OBJECTIVES: dict[str, tuple[Objective, str, dict[str, float]]] = {
    "likelihood": (Likelihood(), "likelihood", {}),
    "plain importance": (PlainImportance(), "plain importance", {}),
    "subset softmax": (SubsetSoftmax(), "subset softmax", {}),
    "logistic ranking": (LogisticRanking(), "logistic ranking", {}),
    "logistic ranking, margin 2": (LogisticRanking(2.0), "logistic ranking", {"margin": 2.0}),
    "hinge ranking": (HingeRanking(), "hinge ranking", {"margin": 1.0}),
    "negative sampling": (NegativeSampling(), "negative sampling", {}),
    "negative sampling, undivided": (NegativeSampling(mean=False), "negative sampling, undivided", {}),
    "noise contrastive": (NoiseContrastive(), "noise contrastive", {}),
    "noise contrastive, fixed z": (NoiseContrastive(2.0), "noise contrastive", {"log_z": 2.0}),
    "noise contrastive, learned": (NoiseContrastive(1.5, learn=True), "noise contrastive", {"log_z": 1.5}),
    "blackout": (BlackOut(), "blackout", {}),
}
