"""Measurements on a training step of a head: the error of log Z̃, and the time that a draw takes."""

import math
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from manyclass import _ranks
from manyclass._context import fork_rng
from manyclass.candidates import Candidates
from manyclass.errors import InaccurateWarning
from manyclass.forms import LogSumExp, transformed
from manyclass.heads._rows import is_sharded
from manyclass.heads.exact import ChunkedHead, exact_scores
from manyclass.heads.examples import Examples
from manyclass.objectives import Objective
from manyclass.samplers import PROBE_EXAMPLES, ErrorProbe, Exhaustive, affordable_interval

T = TypeVar("T")
MAX_TIMED_ROWS = 1 << 17
MAX_TIMED_SCORES = 1 << 24  # of a draw of all classes, which autograd keeps several times
UPDATE_PASSES = 2  # of two reads and one write: gradient, state and weight are read, the last two are written
TIMED_RUNS = 3  # after one that fills caches
MAX_EXPONENT = 700.0  # of a float: the error of a training that diverges has no limit
EXACT_INTERVAL = 50  # steps between two records that all classes were scored


class ProbedHead(ChunkedHead, Protocol):
    """A head whose steps can be measured."""

    @property
    def objective(self) -> Objective: ...

    @property
    def class_vectors(self) -> tuple[Tensor | None, Tensor | None]: ...

    def fused_loss(self, examples: Examples, candidates: Candidates) -> tuple[Tensor, Tensor | None] | None: ...

    def fastest_exact(self, examples: Examples) -> tuple[str | None, float]:
        """Return the fastest way to the exact loss of the examples, and the seconds of the loss and its gradients."""
        ...

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]: ...


def estimates_log_z(objective: Objective) -> bool:
    """Return True if the loss holds an estimate of log Z, so that it has an error."""
    return isinstance(objective.form, LogSumExp) and objective.form.kappa


def probe_step(
    head: ProbedHead, probes: list[ErrorProbe], examples: Examples, candidates: Candidates, loss: Tensor
) -> None:
    """Count a training step, and measure its error of log Z̃ with the probes that are due.

    Args:
        head: the head of the step.
        probes: the probe that decides and warns, then others, which only record.
        examples: the batch.
        candidates: the step's own draw, made for its whole batch.
        loss: the losses [B] over that draw.
    """
    for probe in [probe for probe in probes if probe.count_step()]:
        if candidates.is_exhaustive:
            probe.record(0.0, interval=EXACT_INTERVAL)
            continue
        square = mean_square_error(head, examples, loss, probe.number)
        scored = sum(block.ids.shape[1] for block in candidates.blocks)
        interval = float(affordable_interval(head.num_classes, len(loss), scored))
        # The same on all ranks, which would otherwise probe, exchange and decide at different steps.
        square, interval = (_ranks.mean_over_ranks(value, loss.device) for value in (square, interval))
        probe.record(square, interval=math.ceil(interval))
    if probes[0].should_warn():
        warnings.warn(_warning(probes[0]), InaccurateWarning, stacklevel=2)


@torch.no_grad()
def mean_square_error(head: ProbedHead, examples: Examples, loss: Tensor, turn: int) -> float:
    """Return the mean of (log Z̃ - log Z)² over 64 of the examples, other ones in each turn.

    It scores all classes for them, and synchronises with the device. NaN if all of them are ignored.

    Args:
        head: has the classes.
        examples: the batch.
        loss: losses [B] over a draw for the batch; its objective has a Z̃.
        turn: the number of the measurement.
    """
    batch = len(examples.target)
    few = min(batch, PROBE_EXAMPLES)
    # Shifted by 1 each time: a larger shift may be a multiple of the spacing, and find the same examples again.
    rows = (torch.arange(few, device=loss.device) * batch // few + turn) % batch
    target = examples.target[rows].unsqueeze(1)
    exclude = None if examples.exclude is None else examples.exclude[rows]
    form = head.objective.form
    assert isinstance(form, LogSumExp)
    # A scorer may have dropout, and a training must not depend on what is measured in it.
    with fork_rng(loss.device):
        score, log_z = exact_scores(head, examples.hidden[rows], target, exclude)
        score = score.squeeze(1)
        if form.target_transform is not None and form.target:
            exclude = target if exclude is None else torch.cat([target, exclude], 1)
            others = exact_scores(head, examples.hidden[rows], target[:, :0], exclude)[1]
            log_z = torch.logaddexp(transformed(form, score), others)
    squares = (loss[rows].double() + transformed(form, score).double() - log_z.double()).square()
    return mean_over_valid(squares, None if examples.valid is None else examples.valid[rows])


def mean_over_valid(values: Tensor, valid: Tensor | None) -> float:
    """Return the mean of values [N] over the examples that are not ignored, NaN if all are; None: none is ignored."""
    return float(values.mean() if valid is None else values[valid].mean())


def losses_over(head: ProbedHead, examples: Examples, candidates: Candidates) -> Tensor:
    """Return losses [B] over a draw, from a kernel if there is one."""
    found = head.fused_loss(examples, candidates)
    if found is not None:
        return found[0]
    loss: Tensor = head.objective(*head.candidate_scores(examples.hidden, examples.target, candidates), candidates)
    return loss


def step_seconds(head: ProbedHead, examples: Examples, draw: Callable[[], Candidates]) -> float:
    """Return the least time of a draw, the losses over it and their gradients; NaN if the head is sharded."""
    tables = [table for table in head.class_vectors if table is not None]
    if any(is_sharded(table) for table in tables):
        return math.nan
    device = examples.hidden.device

    def run() -> float:
        started = time.perf_counter()
        hidden = examples.hidden.detach().requires_grad_()
        loss = losses_over(head, replace(examples, hidden=hidden), draw()).mean()
        torch.autograd.grad(loss, [hidden, *(table for table in tables if table.requires_grad)], allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def timed() -> float:
        with torch.enable_grad():
            # The least, since other programs can only make a run longer.
            return min(run() for _ in range(1 + TIMED_RUNS))

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return in_fresh_thread(timed, device)


def exhaustive_seconds(head: ProbedHead, examples: Examples) -> float:
    """Return the seconds of the losses over a draw of all classes, for a head that has no kernel for them.

    A large batch is measured on some of its examples, and the seconds are scaled.
    """
    some = examples.first(max(1, MAX_TIMED_SCORES // head.num_classes))
    target = some.target
    exclude = target[:, None] if not head.objective.keeps_hits else target.new_empty(len(target), 0)
    sampler = Exhaustive(head.num_classes)
    seconds = step_seconds(head, some, lambda: sampler.draw(target, exclude, hidden=None, generator=None))
    return seconds * len(examples.target) / len(target)


def in_fresh_thread(function: Callable[[], T], device: torch.device) -> T:
    """Call a function with autograd: an operator of a compiled graph runs below it, but only in its own thread.

    The global RNG state stays as it is.
    """
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def call() -> T:
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            return function()

    with fork_rng(device), ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def exact_seconds(head: ProbedHead, examples: Examples) -> tuple[str | None, float]:
    """Return the fastest way to the exact loss and its seconds, with the update of all rows; NaN if it is sharded."""
    weight = head.class_vectors[0]
    if weight is not None and is_sharded(weight):
        return None, math.nan
    device = examples.hidden.device
    way, seconds = in_fresh_thread(lambda: head.fastest_exact(examples), device)
    # Row optimisers touch what a step scored, so the exact loss makes their update longer.
    if weight is not None and getattr(head, "sparse", False):
        seconds += UPDATE_PASSES * _pass_seconds(weight)
    return way, seconds


@torch.no_grad()
def _pass_seconds(table: Tensor) -> float:
    """Return the seconds of an operation that reads a table twice and writes another one."""
    part, device = table.detach()[:MAX_TIMED_ROWS], table.device

    def run() -> float:
        started = time.perf_counter()
        torch.add(part, part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return min(run() for _ in range(1 + TIMED_RUNS)) * len(table) / len(part)


def _warning(probe: ErrorProbe) -> str:
    factor = math.exp(min(probe.error or 0.0, MAX_EXPONENT))
    return (
        f"the error of log Z̃ is {probe.error:.2g} nats (root mean square over {probe.pooled} probes, step {probe.steps}"
        f"): probabilities may be off by a factor of {factor:.2g}, and classes that are rarely "
        "drawn come out too probable. Let the head decide (neither `sampler` nor `k`), or use the sampler `Tailored`, "
        "or draw more classes with a larger `k`"
    )
