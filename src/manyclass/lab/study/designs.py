"""The sampling designs that are compared."""

import importlib.util
from collections.abc import Callable, Sequence

from manyclass.counts import ClassCounts
from manyclass.registry import SAMPLERS
from manyclass.samplers import Bernoulli, Clustered, Learned, Nearest, Sampler, Systematic

Design = Callable[[ClassCounts, int], Sampler]

BASELINE, PAPER, PLAIN, CHOSEN = "importance", "Bernoulli", "systematic", "learned, by cluster"

DESIGNS: dict[str, Design] = {
    BASELINE: SAMPLERS["importance"],
    PAPER: SAMPLERS["bernoulli"],
    "Poisson": lambda counts, k: Bernoulli.proportional(counts, k),
    "stratified": lambda counts, k: Systematic(counts, k, stratified=True),
    PLAIN: lambda counts, k: Systematic(counts, k),
    "systematic, random order": lambda counts, k: Systematic(counts, k, order="random"),
    "systematic, by cluster": SAMPLERS["systematic"],
    "learned": lambda counts, k: Learned(counts, k),
    CHOSEN: SAMPLERS["learned"],
    "clustered, groups of 128": lambda counts, k: Clustered(counts, k, group_size=128),
    "clustered, groups of 32": lambda counts, k: Clustered(counts, k, group_size=32),
    "clustered, groups of 8": lambda counts, k: Clustered(counts, k, group_size=8),
    "clustered, each example": lambda counts, k: Clustered(counts, k, group_size=1),
    "nearest, groups of 32": lambda counts, k: Nearest(counts, k, group_size=32),
    "nearest, each example": lambda counts, k: Nearest(counts, k, group_size=1),
}

# What each of them is, for whoever reads the report.
MEANING = {
    BASELINE: "k independent draws from class frequencies, shared by the batch",
    PAPER: "a coin for each class, b = f^α, as in the paper",
    "Poisson": "a coin for each class, π = min(1, a f)",
    "stratified": "one class from each of k strata of equal frequency",
    PLAIN: "k distinct classes, π = min(1, a f), by a comb over the classes from frequent to rare",
    "systematic, random order": "the same over a random order of classes",
    "systematic, by cluster": "the same over classes sorted by clusters of their vectors",
    "learned": "systematic with π learned from the model's probabilities",
    CHOSEN: "the same over classes sorted by clusters of their vectors: what a head with counts does",
    "clustered, groups of 128": "groups of 128 similar examples, each with its own draw where its clusters are likely",
    "clustered, groups of 32": "the same in groups of 32",
    "clustered, groups of 8": "the same in groups of 8",
    "clustered, each example": "the same for each example by itself",
    "nearest, groups of 32": "groups of 32 similar examples, the nearest k/2 classes explicit, the rest systematic",
    "nearest, each example": "the same for each example by itself",
}
_NEEDS_FAISS = ("nearest, groups of 32", "nearest, each example")
# Each example has rows of its own in these: a batch of 1,024 with thousands of them each is gigabytes.
_OWN_ROWS, _MOST_OWN = ("clustered, each example", "nearest, each example"), 512


def sizes(design: str, ks: Sequence[int]) -> list[int]:
    """The numbers of classes that a design is measured with."""
    return [k for k in ks if design not in _OWN_ROWS or k <= _MOST_OWN]


def available() -> list[str]:
    """The designs that can run here."""
    if importlib.util.find_spec("faiss") is None:
        return [name for name in DESIGNS if name not in _NEEDS_FAISS]
    return list(DESIGNS)
