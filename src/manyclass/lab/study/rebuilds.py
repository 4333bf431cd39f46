"""The periodic rebuilds of samplers, to be timed apart from their steps."""

from collections.abc import Callable

from manyclass.samplers import Clustered, Learned, Nearest, Sampler, Systematic


def rebuild_jobs(sampler: Sampler) -> list[tuple[Callable[[], None], int]]:
    """Return each part of a sampler's periodic rebuilds with the number of steps between two runs of it."""
    jobs: list[tuple[Callable[[], None], int]] = []
    if isinstance(sampler, Learned | Clustered | Nearest):
        jobs.append((sampler.refresh, sampler.every))
    inner = sampler.sampler if isinstance(sampler, Learned) else sampler
    if isinstance(inner, Systematic) and inner.order is not None and inner.order.vectors:
        steps = inner.order.steps_per_pass
        jobs += [(inner.order.fit_centroids, steps), (inner.reorder, steps)]
    return jobs
