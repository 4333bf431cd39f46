"""Measurements on a training step of a head: the error of log Z̃, and the time that a draw takes."""

import math
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from manyclass import _ranks
from manyclass.candidates import Candidates
from manyclass.errors import InaccurateWarning
from manyclass.forms import LogSumExp, transformed
from manyclass.heads._rows import is_sharded
from manyclass.heads.exact import ChunkedHead, exact_scores
from manyclass.heads.examples import Examples
from manyclass.objectives import Objective
from manyclass.samplers import PROBE_EXAMPLES, ErrorProbe, affordable_interval

TIMED_RUNS = 3  # after one that warms caches up


class ProbedHead(ChunkedHead, Protocol):
    """A head whose steps can be measured."""

    @property
    def objective(self) -> Objective: ...

    @property
    def class_vectors(self) -> tuple[Tensor | None, Tensor | None]: ...

    def fused_loss(self, examples: Examples, candidates: Candidates) -> tuple[Tensor, Tensor] | None: ...

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]: ...


def estimates_log_z(objective: Objective) -> bool:
    """Return True if the loss holds an estimate of log Z, so that it has an error."""
    return isinstance(objective.form, LogSumExp) and objective.form.kappa


def probe_step(head: ProbedHead, probes: list[ErrorProbe], examples: Examples, scored: int, loss: Tensor) -> None:
    """Count a training step, and measure its error of log Z̃ with the probes that are due.

    Args:
        head: the head of the step.
        probes: the probe that decides and warns, then others, which only record.
        examples: the batch.
        scored: the number of classes that the step scored for an example.
        loss: the losses [B] of the step's own draw, made for its whole batch.
    """
    for probe in [probe for probe in probes if probe.count_step()]:
        square = mean_square_error(head, examples, loss, probe.number)
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
    rows = (torch.arange(few, device=loss.device) * (batch // few) + turn * few) % batch
    target = examples.target[rows].unsqueeze(1)
    exclude = target if examples.exclude is None else torch.cat([target, examples.exclude[rows]], 1)
    form = head.objective.form
    assert isinstance(form, LogSumExp)
    # The target apart from the others: the objective may change its score.
    score = exact_scores(head, examples.hidden[rows], target)[0].squeeze(1)
    others = exact_scores(head, examples.hidden[rows], target[:, :0], exclude)[1]
    own = transformed(form, score) if form.target else score
    log_z = torch.logaddexp(own.double(), others.double())
    squares = (loss[rows].double() + transformed(form, score).double() - log_z).square()
    return float(squares.mean() if examples.valid is None else squares[examples.valid[rows]].mean())


def losses_over(head: ProbedHead, examples: Examples, candidates: Candidates) -> Tensor:
    """Return losses [B] over a draw, from a kernel if there is one."""
    found = head.fused_loss(examples, candidates)
    if found is not None:
        return found[0]
    loss: Tensor = head.objective(*head.candidate_scores(examples.hidden, examples.target, candidates), candidates)
    return loss


def step_seconds(head: ProbedHead, examples: Examples, draw: Callable[[], Candidates]) -> float:
    """Return the median time of a draw, the losses over it and their gradients; NaN if the head is sharded."""
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
            return statistics.median([run() for _ in range(1 + TIMED_RUNS)][1:])

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # An operator of a compiled graph runs below autograd, but only in its own thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(timed).result()


def _warning(probe: ErrorProbe) -> str:
    return (
        f"the error of log Z̃ is {probe.error:.2g} nats (root mean square over {probe.pooled} probes, step {probe.steps}"
        f"): probabilities may be off by a factor of {math.exp(probe.error or 0.0):.2g}, and classes that are rarely "
        "drawn come out too probable. Let the head decide (neither `sampler` nor `k`), or use the sampler `Tailored`, "
        "or draw more classes with a larger `k`"
    )
