"""The periodic rebuilds of samplers, to be timed apart from their steps."""

from collections.abc import Callable

from manyclass.samplers import Clustered, Learned, Sampler, Systematic, Tailored


def rebuild_jobs(sampler: Sampler) -> list[tuple[Callable[[], None], int]]:
    """Return each part of a sampler's periodic rebuilds with the number of steps between two runs of it."""
    jobs: list[tuple[Callable[[], None], int]] = []
    if isinstance(sampler, Learned | Clustered | Tailored):
        jobs.append((sampler.refresh, sampler.every))
    if isinstance(sampler, Systematic | Learned) and sampler.order is not None and sampler.order.vectors:
        steps = sampler.order.steps_per_pass
        jobs += [(sampler.order.fit_centroids, steps), (sampler.reorder, steps)]
    return jobs
