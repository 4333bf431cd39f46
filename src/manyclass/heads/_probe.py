"""Measurements on a training step of a head: the error of log Z̃, and the time that a draw takes."""

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from manyclass import _ranks
from manyclass._context import fork_rng
from manyclass.candidates import Candidates
from manyclass.errors import InaccurateWarning, notify
from manyclass.eval_mode import eval_mode
from manyclass.forms import LogSumExp, transformed
from manyclass.heads._rows import is_sharded
from manyclass.heads.exact import ChunkedHead, exact_scores
from manyclass.heads.examples import Examples
from manyclass.kernels import seconds_of
from manyclass.objectives import Objective
from manyclass.samplers import PROBE_EXAMPLES, ErrorProbe, Exhaustive, Sampler, affordable_interval, deciding_part

T = TypeVar("T")
MAX_TIMED_ROWS = 1 << 17
MAX_TIMED_SCORES = 1 << 24  # of a draw of all classes, which autograd keeps several times
UPDATE_PASSES = 2  # of two reads and one write: gradient, state and weight are read, the last two are written
TIMED_RUNS = 3  # after one that fills caches
MAX_EXPONENT = 700.0  # of a float: the error of a training that diverges has no limit
MAX_EARLY_SCORES = 1 << 24  # of a probe that any step can pay for
EXACT_INTERVAL = 50  # steps between two records that all classes were scored


class ProbedHead(ChunkedHead, Protocol):
    """A head whose steps can be measured."""

    @property
    def objective(self) -> Objective: ...

    @property
    def sampler(self) -> Sampler: ...

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
        interval = math.ceil(_agreed(head, _interval(head, candidates, len(loss)), loss.device))
        is_dear = is_scorer(head) or PROBE_EXAMPLES * head.num_classes > MAX_EARLY_SCORES
        if is_dear and probe.postpones(interval):
            continue
        square = _agreed(
            head,
            mean_square_error(head, examples, _steady_losses(head, examples, candidates, loss), probe.number),
            loss.device,
        )
        probe.record(square, interval=interval)
    if probes[0].should_warn():
        notify(_warning(head, probes[0]), InaccurateWarning)


def _agreed(head: ProbedHead, value: float, device: torch.device) -> float:
    """Return the mean over ranks for a sampler that decides: ranks must probe and decide at the same steps."""
    if head.shard is not None:
        return head.shard.sum(value) / head.shard.ranks
    return value if deciding_part(head.sampler) is None else _ranks.mean_over_ranks(value, device)


def _interval(head: ProbedHead, candidates: Candidates, batch: int) -> int:
    """Return the steps after which a probe costs at most 1 % of them."""
    scored: float = sum(block.ids.shape[1] for block in candidates.blocks)
    if head.shard is not None:
        # The same on all processes, which must probe at the same steps.
        scored = max(1.0, head.shard.sum(scored))
    interval = affordable_interval(head.num_classes, batch, scored)
    if not is_scorer(head):
        return interval
    # A tower runs once for each class, whatever the number of examples.
    encoded = batch + sum(block.ids.numel() for block in candidates.blocks)
    return max(interval, affordable_interval(head.num_classes, PROBE_EXAMPLES, encoded))


def is_scorer(head: ProbedHead) -> bool:
    """Return True if the head has no class vectors: its scores are any function, which may have dropout."""
    return head.class_vectors[0] is None


def steady_scores(head: ProbedHead) -> contextlib.AbstractContextManager[None]:
    """Hold a scorer in evaluation mode: dropout would count as an error, and a measurement must change no buffer."""
    return eval_mode(head) if is_scorer(head) and isinstance(head, nn.Module) else contextlib.nullcontext()


@torch.no_grad()
def _steady_losses(head: ProbedHead, examples: Examples, candidates: Candidates, loss: Tensor) -> Tensor:
    """Return the losses of a step, without the dropout of a scorer."""
    if not is_scorer(head):
        return loss
    with fork_rng(loss.device), steady_scores(head):
        return losses_over(head, examples, candidates)


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
    # A training must not depend on what is measured in it, even if its scorer uses random numbers.
    with fork_rng(loss.device), steady_scores(head):
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
    if head.shard is not None or any(is_sharded(table) for table in tables):
        return math.nan
    device = examples.hidden.device

    def run() -> None:
        hidden = examples.hidden.detach().requires_grad_()
        loss = losses_over(head, replace(examples, hidden=hidden), draw()).mean()
        torch.autograd.grad(loss, [hidden, *(table for table in tables if table.requires_grad)], allow_unused=True)

    def timed() -> float:
        with torch.enable_grad(), steady_scores(head), _without_hooks(tables):
            # The least, since other programs can only make a run longer.
            return min(seconds_of(run, device) for _ in range(1 + TIMED_RUNS))

    return in_fresh_thread(timed, device)


def exhaustive_seconds(head: ProbedHead, examples: Examples) -> float:
    """Return the seconds of the losses over a draw of all classes, for a head that has no kernel for them.

    A large batch is measured on some of its examples, and many classes on some of them; the seconds are scaled.
    """
    classes = min(head.num_classes, MAX_TIMED_ROWS)
    some = examples.first(max(1, MAX_TIMED_SCORES // classes))
    some = replace(some, target=some.target % classes, exclude=None, include=None)
    target = some.target
    exclude = target[:, None] if not head.objective.keeps_hits else target.new_empty(len(target), 0)
    sampler = Exhaustive(classes)
    seconds = step_seconds(head, some, lambda: sampler.draw(target, exclude, hidden=None, generator=None))
    return seconds * len(examples.target) / len(target) * head.num_classes / classes


@contextlib.contextmanager
def _without_hooks(tables: list[Tensor]) -> Iterator[None]:
    """Take the hooks off tables: they must not see the gradients of a measurement."""
    hooks = [table._backward_hooks for table in tables]
    try:
        for table in tables:
            table._backward_hooks = None
        yield
    finally:
        for table, own in zip(tables, hooks, strict=True):
            table._backward_hooks = own


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
    if head.shard is not None or (weight is not None and is_sharded(weight)):
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
    part = table.detach()[:MAX_TIMED_ROWS]
    seconds = min(seconds_of(lambda: torch.add(part, part), table.device) for _ in range(1 + TIMED_RUNS))
    return seconds * len(table) / len(part)


def _warning(head: ProbedHead, probe: ErrorProbe) -> str:
    factor = math.exp(min(probe.error or 0.0, MAX_EXPONENT))
    advice = "Draw more classes with a larger `k`"
    if not is_scorer(head):
        advice = (
            "Let the head decide (neither `sampler` nor `k`), or use the sampler `Tailored`, or draw more classes with "
            "a larger `k`"
        )
    return (
        f"the error of log Z̃ is {probe.error:.2g} nats (root mean square over {probe.pooled} probes, step {probe.steps}"
        f"): probabilities may be off by a factor of {factor:.2g}, and classes that are rarely "
        f"drawn come out too probable. {advice}"
    )
