"""Contenders of the benchmark of steps on a GPU: each is a function that makes one training step."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.counts import zipf_counts
from manyclass import ClassHead
from manyclass.kernels import triton
from manyclass.optim import RowAdagrad
from manyclass.samplers import ErrorProbe, Systematic
from manyclass.training import ReplayedStep

MAX_EXACT_CLASSES = 200_000
LEARNING_RATE = 0.1
BATCHES = 4  # of targets, used in turn, so that the same rows are not in the cache


@dataclass(frozen=True)
class Setting:
    """Sizes of a step: classes, dimensions, examples and classes drawn."""

    classes: int
    dim: int
    batch: int
    k: int


SETTINGS = {
    "items": Setting(1_000_000, 256, 8192, 8192),
    "many items": Setting(100_000_000, 128, 8192, 8192),
    "tokens": Setting(131_072, 2048, 8192, 8192),
    "words": Setting(33_000, 128, 1024, 1024),
}
Step = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """The operands of a step: a table, its counts, hidden vectors, batches of targets, and a sampler that all share."""

    setting: Setting
    weight: Tensor
    counts: Tensor
    hidden: Tensor
    targets: list[Tensor]
    sampler: Systematic


def problem(setting: Setting, device: str) -> Problem:
    """Return a problem whose targets follow Zipf's law."""
    counts, _ = zipf_counts(setting.classes)
    generator = torch.Generator().manual_seed(0)
    line = counts.cumsum(0)
    place = torch.rand(BATCHES, setting.batch, dtype=torch.float64, generator=generator) * line[-1]
    targets = torch.searchsorted(line, place).clamp_(max=setting.classes - 1)
    weight = torch.empty(setting.classes, setting.dim, dtype=torch.bfloat16, device=device)
    weight.normal_(std=setting.dim**-0.5)
    hidden = torch.randn(setting.batch, setting.dim, device=device).bfloat16()
    sampler = Systematic(counts, setting.k).to(device)
    return Problem(setting, weight, counts, hidden, list(targets.to(device)), sampler)


def in_turn(targets: list[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns the batches of targets in turn."""
    number = 0

    def take() -> Tensor:
        nonlocal number
        number += 1
        return targets[number % len(targets)]

    return take


def floor(given: Problem) -> Step:
    """Return the products of a step, and its rows read and written."""
    setting, weight, hidden = given.setting, given.weight, given.hidden
    drawn = torch.randint(setting.classes, (setting.k,), device=weight.device)
    target = in_turn(given.targets)

    def step() -> None:
        ids = torch.cat([target(), drawn])
        rows = weight.index_select(0, ids)
        scores = hidden @ rows[setting.batch :].T
        scores @ rows[setting.batch :]
        scores.T @ hidden
        # The rows as they were: the other contenders train the same table.
        weight.index_copy_(0, ids, rows)

    return step


def ours(given: Problem, impl: str | None, *, replayed: bool = False, compiled: bool = False) -> Step:
    """Return a step of a head with an implementation; None: the default sampler with the default one.

    Args:
        given: the operands.
        impl: the implementation.
        replayed: whether the step is replayed as a CUDA graph.
        compiled: whether the head is compiled by torch.
    """
    setting, sampler = given.setting, None if impl is None else given.sampler
    head = ClassHead(
        setting.dim,
        setting.classes,
        counts=given.counts,
        sampler=sampler,
        impl=impl or "auto",
        bias=False,
        sparse=True,
        weight=torch.nn.Parameter(given.weight),
    ).to(given.weight.device)
    if impl is not None:
        # Probes take 1 % of the time of a training, but would be all of the profile of a step that has one.
        head.own_probe = ErrorProbe(every=1 << 30)
    optimizer = RowAdagrad(head.parameters(), LEARNING_RATE, by_row=True, impl=impl or "auto")
    target = in_turn(given.targets)
    run = torch.compile(head) if compiled else head

    def loss(target: Tensor) -> Tensor:
        return run(given.hidden.detach().requires_grad_(), target)

    if replayed:
        whole = ReplayedStep(loss, optimizer)
        return lambda: whole(target())

    def step() -> None:
        optimizer.zero_grad()
        loss(target()).backward()
        optimizer.step()

    return step


def plain_torch(given: Problem) -> Step:
    """Return a hand-written step: classes drawn by frequency with replacement, κ = 1/(k q)."""
    setting, weight, device = given.setting, given.weight, given.weight.device
    line = given.counts.cumsum(0).to(device)
    log_q = (given.counts / given.counts.sum()).log().float().to(device)
    state = torch.zeros(setting.classes, device=device)
    target_of = in_turn(given.targets)
    log_k = torch.tensor(float(setting.k), device=device).log()

    def step() -> None:
        target, hidden = target_of(), given.hidden.detach().requires_grad_()
        place = torch.rand(setting.k, dtype=torch.float64, device=device) * line[-1]
        drawn = torch.searchsorted(line, place).clamp_(max=setting.classes - 1)
        ids = torch.cat([target, drawn])
        rows = weight.index_select(0, ids).requires_grad_()
        own = (hidden * rows[: setting.batch]).float().sum(1, keepdim=True)
        scores = (hidden @ rows[setting.batch :].T).float() - (log_q[drawn] + log_k)
        scores = scores.masked_fill(drawn == target.unsqueeze(1), float("-inf"))
        loss = F.cross_entropy(torch.cat([own, scores], 1), torch.zeros_like(target))
        gradient = torch.autograd.grad(loss, [hidden, rows])[1].float()
        unique, place = ids.unique(return_inverse=True)
        total = torch.zeros(len(unique), setting.dim, device=device).index_add_(0, place, gradient)
        squares = state[unique] + total.square().mean(1)
        state[unique] = squares
        moved = weight[unique].float() - LEARNING_RATE * total / (squares.sqrt().unsqueeze(1) + 1e-10)
        weight[unique] = moved.bfloat16()

    return step


def exact_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss over all classes."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def liger(given: Problem) -> Step:
    """Return forward and backward passes over all classes by Liger's fused linear cross entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return passes(given, lambda hidden, weight, target: liger_fused_linear_cross_entropy(hidden, weight, target))


def cut_cross_entropy(given: Problem) -> Step:
    """Return forward and backward passes over all classes by Apple's cut cross entropy."""
    from cut_cross_entropy import linear_cross_entropy

    return passes(given, lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target))


def passes(given: Problem, loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """Return a step of forward and backward passes over all classes, without an update."""
    weight, target = given.weight.detach().requires_grad_(), in_turn(given.targets)

    def step() -> None:
        hidden = given.hidden.detach().requires_grad_()
        torch.autograd.grad(loss_of(hidden, weight, target()), [hidden, weight])

    return step


@dataclass(frozen=True)
class Contender:
    """A way to make a step.

    Args:
        make: returns the step for a problem.
        scores_all: whether it scores all classes.
        package: the package that it needs; None: only torch.
        needs_triton: whether it needs a GPU that Triton compiles for.
    """

    make: Callable[[Problem], Step]
    scores_all: bool = False
    package: str | None = None
    needs_triton: bool = False


CONTENDERS = {
    "floor": Contender(floor),
    "eager": Contender(lambda given: ours(given, "eager")),
    "triton": Contender(lambda given: ours(given, "triton"), needs_triton=True),
    "replayed": Contender(lambda given: ours(given, "triton", replayed=True), needs_triton=True),
    "auto": Contender(lambda given: ours(given, "auto")),
    "compiled": Contender(lambda given: ours(given, "eager", compiled=True), needs_triton=True),
    "compiled, triton": Contender(lambda given: ours(given, "triton", compiled=True), needs_triton=True),
    "default": Contender(lambda given: ours(given, None)),
    "plain torch": Contender(plain_torch),
    "exact": Contender(lambda given: passes(given, exact_loss), scores_all=True),
    "exact, compiled": Contender(lambda given: passes(given, torch.compile(exact_loss)), scores_all=True),
    "liger": Contender(liger, scores_all=True, package="liger_kernel", needs_triton=True),
    "cut cross entropy": Contender(cut_cross_entropy, scores_all=True, package="cut_cross_entropy", needs_triton=True),
}


def absence(name: str, given: Problem) -> str | None:
    """Return the reason why a contender does not run here; None if it does."""
    contender, classes = CONTENDERS[name], given.setting.classes
    if contender.scores_all and classes > MAX_EXACT_CLASSES:
        return f"all {classes:,} classes take too long"
    if contender.package is not None and importlib.util.find_spec(contender.package) is None:
        return f"{contender.package} is not installed"
    if contender.needs_triton and not triton.is_available(given.hidden):
        return "no GPU that Triton compiles for"
    return None


def floating_operations(setting: Setting, *, scores_all: bool) -> float:
    """Return the floating-point operations of the three products of a step."""
    return 6.0 * setting.batch * setting.dim * (setting.classes if scores_all else setting.k)


def traffic_bytes(setting: Setting, *, scores_all: bool) -> float:
    """Return the least bytes that a step in bfloat16 reads and writes.

    The rows are read and written once, and so are their gradients; a sampled step also stores its scores, which it
    writes once and reads twice. Over all classes only the table is read and its gradient written.
    """
    if scores_all:
        return 2.0 * 2 * setting.classes * setting.dim
    rows = 2.0 * 4 * (setting.batch + setting.k) * setting.dim
    return rows + 2.0 * 3 * setting.batch * setting.k
