"""Measurements of a design: error on the exactly trained model, step time, and held-out loss in training."""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manyclass.diagnostics import diagnose
from manyclass.lab.study.designs import DESIGNS
from manyclass.lab.study.model import (
    BATCH_SIZE,
    DIM,
    ContextBatches,
    class_counts,
    load_text,
    loss_columns,
    train_model,
)
from manyclass.lab.study.rebuilds import rebuild_jobs
from manyclass.lab.study.reference import load_reference
from manyclass.optim import RowAdagrad

TIMED_BATCH_SIZE = 1024
LEARNING_STEPS = 1000  # made before the error of a learning sampler is measured
TIMING_ROUNDS, TIMED_STEPS, WARM_UP_STEPS = 7, 8, 3


def train_design(
    *, text: str, design: str | None, k: int, rate: float, seed: int, epochs: int, parts: int, device: str, folder: str
) -> dict[str, Any]:
    """Compute a cell: exact held-out losses of a training on the first of `parts` equal parts of the text."""
    train, held_out, num_classes = load_text(Path(folder) / f"{text}.pt", device)
    part = train[: max(len(train) // parts, 2 * BATCH_SIZE)]
    points = 1 if parts > 1 else 4
    settings: dict[str, Any] = {"design": design, "k": k, "rate": rate, "seed": seed, "epochs": epochs}
    done = train_model(train, held_out, num_classes, part=part, points=points, **settings)
    return loss_columns(done.points)


def design_error(
    *, text: str, design: str, k: int, rate: float, seed: int, epochs: int, draws: int, device: str, folder: str
) -> dict[str, Any]:
    """Compute a cell: the error of a design on the exactly trained model and a held-out batch."""
    encoder, head = load_reference(text=text, rate=rate, seed=seed, epochs=epochs, device=device, folder=folder)
    train, held_out, num_classes = load_text(Path(folder) / f"{text}.pt", device)
    sampler = DESIGNS[design](class_counts(train, num_classes), k)
    head.use(sampler)
    generator = torch.Generator(device).manual_seed(seed)
    if sampler.learns:
        head.train()
        for context, target in itertools.islice(ContextBatches(train, seed=seed), LEARNING_STEPS):
            with torch.no_grad():
                hidden = encoder(context)
            head(hidden, target, generator=generator)
    head.eval()
    # The batch is shuffled, because neighbours in a text are more alike than the examples of a training step.
    context, target = next(iter(ContextBatches(held_out, batch=TIMED_BATCH_SIZE, seed=seed)))
    with torch.no_grad():
        hidden = encoder(context)
    found = diagnose(head, hidden, target, draws=draws, generator=generator)
    names = ("rmse_log_z", "bias_log_z", "gamma_rmse", "sign_agreement", "classes_scored", "rows_touched")
    return {name: getattr(found, name) for name in names}


def step_times(
    *, text: str, contenders: list[tuple[str, int]], rate: float, seed: int, epochs: int, device: str, folder: str
) -> dict[str, Any]:
    """Compute a cell: milliseconds per step of each design and k, timed in turn on the exactly trained model.

    A step draws, scores, computes gradients and updates rows, for a batch of 1,024 without an encoder. A design's
    periodic rebuild is timed separately and divided by the number of steps between rebuilds.
    """
    encoder, head = load_reference(text=text, rate=rate, seed=seed, epochs=epochs, device=device, folder=folder)
    train, _, num_classes = load_text(Path(folder) / f"{text}.pt", device)
    batches = []
    for context, target in itertools.islice(ContextBatches(train, batch=TIMED_BATCH_SIZE, seed=seed), 8):
        with torch.no_grad():
            batches.append((encoder(context), target))
    # The learning rate is so small that the model does not change.
    optimizer = RowAdagrad(head.parameters(), lr=1e-7)
    generator = torch.Generator(device).manual_seed(seed)
    head.train()

    def step(number: int) -> None:
        hidden, target = batches[number % len(batches)]
        optimizer.zero_grad()
        head(hidden.requires_grad_(), target, generator=generator).backward()
        optimizer.step()

    counts = class_counts(train, num_classes)
    samplers = [DESIGNS[design](counts, k) for design, k in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    rebuilds = []
    for sampler in samplers:
        head.use(sampler)
        step(0)
        jobs = rebuild_jobs(sampler)
        rebuilds.append(sum(statistics.median(_seconds(run, device) for _ in range(3)) / every for run, every in jobs))
    for _ in range(TIMING_ROUNDS):
        for sampler, found in zip(samplers, times, strict=True):
            # `use` would rebuild the sampler, which knows the class vectors already.
            head.sampler = sampler
            for number in range(WARM_UP_STEPS):
                step(number)
            for number in range(TIMED_STEPS):
                found.append(_seconds(lambda number=number: step(number), device))  # type: ignore[misc]
    return {
        "contenders": contenders,
        "step_ms": [1000 * statistics.median(found) for found in times],
        "rebuild_ms": [1000 * seconds for seconds in rebuilds],
        "gflops": _matmul_gflops(device),
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _matmul_gflops(device: str) -> float:
    """Measure GFLOP/s of the matrix product in a step with k = 1024."""
    a, b = torch.randn(TIMED_BATCH_SIZE, DIM, device=device), torch.randn(DIM, 1024, device=device)
    seconds = statistics.median(_seconds(lambda: a @ b, device) for _ in range(50))
    return 2 * TIMED_BATCH_SIZE * DIM * 1024 / seconds / 1e9
