"""The sampling designs that the study compares."""

from collections.abc import Callable, Sequence

from manyclass.counts import ClassCounts
from manyclass.registry import SAMPLERS
from manyclass.samplers import Bernoulli, Clustered, Learned, Sampler, Systematic

Design = Callable[[ClassCounts, int], Sampler]

BASELINE_DESIGN, PAPER_DESIGN = "importance", "Bernoulli"
SYSTEMATIC_DESIGN, DEFAULT_DESIGN = "systematic", "learned, by cluster"

DESIGNS: dict[str, Design] = {
    BASELINE_DESIGN: SAMPLERS["importance"],
    PAPER_DESIGN: SAMPLERS["bernoulli"],
    "Poisson": lambda counts, k: Bernoulli.proportional(counts, k),
    "stratified": lambda counts, k: Systematic(counts, k, stratified=True),
    SYSTEMATIC_DESIGN: lambda counts, k: Systematic(counts, k),
    "systematic, random order": lambda counts, k: Systematic(counts, k, order="random"),
    "systematic, by cluster": SAMPLERS["systematic"],
    "learned": lambda counts, k: Learned(counts, k),
    DEFAULT_DESIGN: SAMPLERS["learned"],
    "clustered, groups of 128": lambda counts, k: Clustered(counts, k, group_size=128),
    "clustered, groups of 32": lambda counts, k: Clustered(counts, k, group_size=32),
    "clustered, groups of 8": lambda counts, k: Clustered(counts, k, group_size=8),
    "clustered, each example": lambda counts, k: Clustered(counts, k, group_size=1),
    "tailored": SAMPLERS["tailored"],
}

# Descriptions for the report.
DESIGN_DESCRIPTIONS = {
    BASELINE_DESIGN: "k independent draws from class frequencies f, shared by the batch",
    PAPER_DESIGN: "an independent coin flip for each class with probability b = f^α, as in the paper",
    "Poisson": "an independent coin flip for each class with probability π = min(1, a f)",
    "stratified": "one class from each of k strata of equal total frequency",
    SYSTEMATIC_DESIGN: "k distinct classes with π = min(1, a f): systematic sampling over classes sorted by frequency",
    "systematic, random order": "systematic sampling over a random order of classes",
    "systematic, by cluster": "systematic sampling over classes sorted by clusters of their vectors",
    "learned": "systematic sampling with π learned from the model's probabilities",
    DEFAULT_DESIGN: "as “learned”, over classes sorted by clusters of their vectors: the default of a head with counts",
    "clustered, groups of 128": "groups of 128 similar examples with a separate draw each that favours likely clusters",
    "clustered, groups of 32": "the same in groups of 32",
    "clustered, groups of 8": "the same in groups of 8",
    "clustered, each example": "the same with a separate draw for each example",
    "tailored": "systematic sampling with π from the largest probability that an example of the batch gives to a class",
}
# These designs gather separate rows for each example: thousands of rows for a batch of 1,024 take gigabytes.
PER_EXAMPLE_DESIGNS, MAX_PER_EXAMPLE_K = ("clustered, each example",), 512


def measured_ks(design: str, ks: Sequence[int]) -> list[int]:
    """Return the values of k at which a design is measured."""
    return [k for k in ks if design not in PER_EXAMPLE_DESIGNS or k <= MAX_PER_EXAMPLE_K]
