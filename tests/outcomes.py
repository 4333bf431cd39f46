"""Enumerates all outcomes of a sampler's draw with their probabilities, by patching its random numbers."""

import itertools
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.samplers import Bernoulli, Importance, Sampler, Systematic, WithExplicit
from tests import reference


def outcomes(
    sampler: Sampler, weights: list[float], target: Tensor, exclude: Tensor, include: Tensor | None = None
) -> Iterator[tuple[float, Candidates]]:
    """Yield each outcome's probability, which sum to 1, and the sampler's candidates.

    A slot of `Importance` depends on one uniform number, so integrating over one number for all slots gives the
    distribution of each: enough for functions that are linear in the slots. The same holds for one offset for all
    points of a stratified grid.

    Args:
        sampler: the sampler.
        weights: class weights, 0 for classes that the innermost sampler leaves to an explicit set.
        target: targets of the draw.
        exclude: exclusions of the draw.
        include: inclusions of the draw.
    """
    inner = sampler

    def draw() -> Candidates:
        return sampler(target, include=include, exclude=exclude)

    batch_explicit = False
    while isinstance(inner, WithExplicit):
        batch_explicit |= inner._explicit is None
        inner = inner.sampler
    if isinstance(inner, Importance):
        edges = {0.0, 1.0}
        for example in range(len(target)):
            excluded = set(exclude[example].tolist()) | (set(target.tolist()) if batch_explicit else set())
            excluded |= set() if include is None else set(include[example].tolist())
            edges |= set(_cumulative(weights, excluded if inner.group_size == 1 else set()))
        yield from _integrate(draw, sorted(edges))
    elif isinstance(inner, Systematic):
        pi = reference.inclusion_probabilities(weights, inner.k)
        if inner.comb.table.order is not None:
            pi = [pi[c] for c in inner.comb.table.order.tolist()]
        yield from _integrate(draw, reference.systematic_breakpoints(pi))
    elif isinstance(inner, Bernoulli):
        yield from _subsets(draw, inner, weights)
    else:
        yield 1.0, draw()


def _cumulative(weights: list[float], excluded: set[int]) -> list[float]:
    left = [0.0 if c in excluded else w for c, w in enumerate(weights)]
    total = sum(left)
    return [sum(left[: c + 1]) / total for c in range(len(left))] if total > 0 else []


def _integrate(draw: Callable[[], Candidates], edges: list[float]) -> Iterator[tuple[float, Candidates]]:
    for low, high in itertools.pairwise(edges):
        if high - low < 1e-12:
            continue

        def uniform(*size: int, dtype: torch.dtype, value: float = (low + high) / 2, **_: object) -> Tensor:
            return torch.full(size, value, dtype=dtype)

        with patch("torch.rand", uniform):
            yield high - low, draw()


def _subsets(
    draw: Callable[[], Candidates], inner: Bernoulli, weights: list[float]
) -> Iterator[tuple[float, Candidates]]:
    if inner.k is None:
        b = weights
    elif inner._proportional:
        b = reference.inclusion_probabilities(weights, inner.k)
    else:
        b = reference.bernoulli_probabilities(weights, inner.k)
    classes = [c for c, p in enumerate(b) if p > 0]
    # The table gives the interval of each class on the line; its length must correspond to b.
    start, end = inner.table.interval(torch.arange(len(b)))
    for c in classes:
        on_line = -torch.expm1(start[c] - end[c]).item()
        assert abs(on_line - b[c]) < 1e-9 or c in inner._likely
    for kept in itertools.product((False, True), repeat=len(classes)):
        chosen = {c for c, keep in zip(classes, kept, strict=True) if keep}
        probability = 1.0
        for c in classes:
            probability *= b[c] if c in chosen else 1 - b[c]
        if probability < 1e-15:
            continue
        # Put two points into each chosen class, the second of which must change nothing, and the last beyond the line.
        points = []
        for c in sorted(chosen):
            if c not in inner._likely:
                points += [start[c] + (end[c] - start[c]) * x for x in (0.25, 0.75)]
        coins = torch.tensor([0.0 if c in chosen else 1.0 - 1e-16 for c in inner._likely.tolist()], dtype=torch.float64)

        # The sampler first draws coins, if there are any, and then the gaps between points as -log(1 - u).
        ends = torch.tensor([*points, inner.table.total + 1], dtype=torch.float64)
        gap = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.float64))
        numbers = iter([coins] * (len(coins) > 0) + [-torch.expm1(-gap)])

        def uniform(groups: int, number: int, numbers: Iterator[Tensor] = numbers, **_: object) -> Tensor:
            row = next(numbers)
            assert number >= len(row)
            return torch.cat([row, row.new_full((number - len(row),), 0.5)]).repeat(groups, 1)

        with patch("torch.rand", uniform):
            yield probability, draw()
