"""What is measured of a design: its error on the exactly trained model, its time, and what it trains."""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manyclass.diagnostics import diagnose
from manyclass.lab.study.designs import DESIGNS
from manyclass.lab.study.model import BATCH, DIM, Windows, counts_of, curve, load, train_model
from manyclass.lab.study.reference import load_reference
from manyclass.lab.study.upkeep import upkeep_jobs
from manyclass.optim import RowAdagrad

TIMED_BATCH = 1024
_TAUGHT = 1000  # steps that a design which learns is given to learn the reference
_ROUNDS, _STEPS, _WARM = 7, 8, 3


def train_with(
    *, text: str, design: str | None, k: int, rate: float, seed: int, epochs: int, share: int, device: str, folder: str
) -> dict[str, Any]:
    """A cell: train with a design on the first 1/share of the text, and tell the exact held-out loss on the way."""
    train, held_out, num_classes = load(Path(folder) / f"{text}.pt", device)
    part = train[: max(len(train) // share, 2 * BATCH)]
    points = 1 if share > 1 else 4
    settings: dict[str, Any] = {"design": design, "k": k, "rate": rate, "seed": seed, "epochs": epochs}
    done = train_model(train, held_out, num_classes, part=part, points=points, **settings)
    return curve(done.points)


def error(
    *,
    text: str,
    design: str,
    k: int,
    rate: float,
    seed: int,
    epochs: int,
    draws: int,
    device: str,
    folder: str,
) -> dict[str, Any]:
    """A cell: how far a design is from the exactly trained model on a held-out batch."""
    encoder, head = load_reference(text=text, rate=rate, seed=seed, epochs=epochs, device=device, folder=folder)
    train, held_out, num_classes = load(Path(folder) / f"{text}.pt", device)
    sampler = DESIGNS[design](counts_of(train, num_classes), k)
    head.use(sampler)
    generator = torch.Generator(device).manual_seed(seed)
    if sampler.learns:
        head.train()
        for context, target in itertools.islice(Windows(train, seed=seed), _TAUGHT):
            with torch.no_grad():
                hidden = encoder(context)
            head(hidden, target, generator=generator)
    head.eval()
    # A batch at random: neighbours in a text are more alike than examples of a step are.
    context, target = next(iter(Windows(held_out, batch=TIMED_BATCH, seed=seed)))
    with torch.no_grad():
        hidden = encoder(context)
    found = diagnose(head, hidden, target, draws=draws, generator=generator)
    return {
        "rmse_log_z": found.rmse_log_z,
        "bias_log_z": found.bias_log_z,
        "gamma_rmse": found.gamma_rmse,
        "sign_agreement": found.sign_agreement,
        "classes_scored": found.classes_scored,
        "rows_touched": found.rows_touched,
    }


def step_times(
    *,
    text: str,
    contenders: list[tuple[str, int]],
    rate: float,
    seed: int,
    epochs: int,
    device: str,
    folder: str,
) -> dict[str, Any]:
    """A cell: milliseconds of a step of each design and k, all of them in turn, on the exactly trained model.

    A step draws, scores, takes gradients and updates the rows; a batch of 1,024, no encoder. What a design renews
    every so many steps is timed by itself, and a step bears its share of it.
    """
    encoder, head = load_reference(text=text, rate=rate, seed=seed, epochs=epochs, device=device, folder=folder)
    train, _, num_classes = load(Path(folder) / f"{text}.pt", device)
    batches = []
    for context, target in itertools.islice(Windows(train, batch=TIMED_BATCH, seed=seed), 8):
        with torch.no_grad():
            batches.append((encoder(context), target))
    # So slow that the model stays what it is.
    optimizer = RowAdagrad(head.parameters(), lr=1e-7)
    generator = torch.Generator(device).manual_seed(seed)
    head.train()

    def step(number: int) -> None:
        hidden, target = batches[number % len(batches)]
        optimizer.zero_grad()
        head(hidden.requires_grad_(), target, generator=generator).backward()
        optimizer.step()

    counts = counts_of(train, num_classes)
    samplers = [DESIGNS[design](counts, k) for design, k in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    upkeep = []
    for sampler in samplers:
        head.use(sampler)
        step(0)
        jobs = upkeep_jobs(sampler)
        upkeep.append(sum(statistics.median(_seconds(run, device) for _ in range(3)) / every for run, every in jobs))
    for _ in range(_ROUNDS):
        for sampler, found in zip(samplers, times, strict=True):
            # Not by `use`: it knows the class vectors already.
            head.sampler = sampler
            for number in range(_WARM):
                step(number)
            for number in range(_STEPS):
                found.append(_seconds(lambda number=number: step(number), device))  # type: ignore[misc]
    return {
        "contenders": contenders,
        "step_ms": [1000 * statistics.median(found) for found in times],
        "upkeep_ms": [1000 * seconds for seconds in upkeep],
        "gflops": _matmul_rate(device),
    }


def _seconds(run: Callable[[], object], device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _matmul_rate(device: str) -> float:
    """GFLOP/s of the product that a step with k = 1024 consists of."""
    a, b = torch.randn(TIMED_BATCH, DIM, device=device), torch.randn(DIM, 1024, device=device)
    seconds = statistics.median(_seconds(lambda: a @ b, device) for _ in range(50))
    return 2 * TIMED_BATCH * DIM * 1024 / seconds / 1e9
