"""The losses of a head with a sampler, the same for every way to score a class."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.defaults import IGNORE_INDEX
from manyclass.forms import LogSumExp, transformed
from manyclass.heads.exact import ChunkedHead, exact_scores
from manyclass.heads.examples import Examples, flatten_examples
from manyclass.objectives import Likelihood, Objective
from manyclass.samplers import Observation, Sampler

OBSERVED_EXAMPLES = 256  # at most, in an observation: all of a large batch would cost a quarter of the step
PROBE_EXAMPLES = 64
PROBE_DRAWS = 4


class SampledHead(ChunkedHead, Protocol):
    """A head whose loss combines a sampler and an objective, and which can also compute the exact loss."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def objective(self) -> Objective: ...

    @property
    def training(self) -> bool: ...

    @property
    def tables(self) -> Mapping[str, Tensor | None]:
        """The class parameters by name, for errors."""
        ...

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise if the head cannot score `hidden`."""
        ...

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return scores of the targets [B] and of the candidates [B, ΣK], -inf where excluded."""
        ...

    def fused_loss(self, examples: Examples, candidates: Candidates) -> tuple[Tensor, Tensor] | None:
        """Return losses [B] and ∂loss/∂s [B, K] from a kernel; None if there is none for this head and draw."""
        ...

    def scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the scores of classes."""
        ...

    def log_z(self, hidden: Tensor) -> Tensor:
        """Return the exact log Z."""
        ...


def sampled_loss(
    self: SampledHead,
    hidden: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    exclude: Tensor | None = None,
    log_z: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the loss of the objective over one draw of the sampler.

    Args:
        hidden: [..., D], or whatever a scorer takes, [*target.shape, ...].
        target: ids [...].
        weight: the weight of each example [...]; the mean is divided by their sum.
        exclude: ids [..., E], -1 pads: classes that must not count as negatives of that example.
        log_z: [...], the log normaliser of each example, for an objective that has one (NoiseContrastive).
        ignore_index: the target of examples that are left out of the loss.
        reduction: "mean", "sum" or "none".
        generator: for the draw; None: torch's global generator.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype, device or value; the message names it.
    """
    self.check_hidden(hidden)
    examples = flatten_examples(
        hidden,
        target,
        self.num_classes,
        weight=weight,
        exclude=exclude,
        log_z=log_z,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return examples.reduce(_losses(self, examples, generator), reduction)


def exact_loss(
    self: SampledHead,
    hidden: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    exclude: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """Return the exact cross entropy over all classes not excluded, computed in chunks of classes; it is never below 0.

    The gradients of a table of class vectors are dense. Arguments are those of the sampled loss.
    """
    self.check_hidden(hidden)
    examples = flatten_examples(
        hidden,
        target,
        self.num_classes,
        weight=weight,
        exclude=exclude,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    target_score, log_z = exact_scores(self, examples.hidden, examples.target.unsqueeze(1), examples.exclude)
    loss = log_z - target_score.squeeze(1)
    _check.finite_loss(loss, hidden=examples.hidden, **self.tables, target_score=target_score)
    return examples.reduce(loss, reduction)


def approximate_log_likelihood(
    self: SampledHead,
    hidden: Tensor,
    target: Tensor,
    *,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the paper's estimate of log p(target) [...] from one draw, for monitoring under any objective.

    On average it is a little too high. Without a generator it draws from torch's global one.
    """
    self.check_hidden(hidden)
    examples = flatten_examples(hidden, target, self.num_classes, exclude=exclude)
    likelihood = Likelihood()
    with torch.no_grad():
        candidates = draw_candidates(self, examples, likelihood, generator)
        loss = likelihood(*self.candidate_scores(examples.hidden, examples.target, candidates), candidates)
    return -loss.reshape(examples.shape)


def draw_candidates(
    head: SampledHead, examples: Examples, objective: Objective, generator: torch.Generator | None = None
) -> Candidates:
    """Draw candidates for examples; targets are excluded unless the objective keeps hits."""
    exclude = examples.exclude
    if not objective.keeps_hits:
        target = examples.target.unsqueeze(1)
        exclude = target if exclude is None else torch.cat([target, exclude], 1)
    elif exclude is None:
        exclude = examples.target.new_empty(len(examples.target), 0)
    if head.sampler.device not in (None, examples.target.device):
        raise ValueError(f"`sampler` must be on {examples.target.device}, got {head.sampler.device}")
    return head.sampler.draw(examples.target, exclude, hidden=examples.hidden.detach(), generator=generator)


def _losses(head: SampledHead, examples: Examples, generator: torch.Generator | None) -> Tensor:
    """Return losses [B] over one draw; in training, the sampler advances before it and observes after it."""
    objective, sampler = head.objective, head.sampler
    if examples.log_z is not None and not objective.normalised:
        raise ValueError(f"`log_z` must be None for {objective!r}, which has no z, got a tensor")
    # A compiled graph holds the sampler's tables as constants, so nothing may change them inside it.
    trains = head.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if trains:
        sampler.advance()
    candidates = draw_candidates(head, examples, objective, generator)
    loss, slot_weights = _fused(head, examples, candidates) or _eager(head, examples, candidates)
    if trains and sampler.learns and isinstance(objective.form, LogSumExp) and objective.form.kappa:
        sampler.observe(
            Observation(
                candidates,
                lambda: _root_mean_square(slot_weights(), candidates),
                lambda seed: rmse_log_z(head, examples, seed=seed),
            )
        )
    return loss


def _fused(head: SampledHead, examples: Examples, candidates: Candidates) -> tuple[Tensor, Callable[[], Tensor]] | None:
    """Return losses [B] and a function that returns κ u/Z̃ [B, K], from a kernel."""
    # Kernels read the memory of tensors, which a graph that is being compiled does not have.
    found = None if torch.compiler.is_compiling() else head.fused_loss(examples, candidates)
    # On NaN, rerun eagerly: that path names the bad input.
    if found is None or (_check.reads_values(found[0]) and math.isnan(found[0].detach().sum().item())):
        return None
    loss, score_gradient = found
    # For the log-sum-exp form ∂loss/∂s of a slot is κ u/Z̃.
    return loss, lambda: score_gradient


def _eager(head: SampledHead, examples: Examples, candidates: Candidates) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return losses [B] and a function that returns κ u/Z̃ [B, K], by autograd."""
    target_score, scores = head.candidate_scores(examples.hidden, examples.target, candidates)
    if examples.log_z is not None:
        target_score, scores = target_score - examples.log_z, scores - examples.log_z.unsqueeze(1)
    loss: Tensor = head.objective(target_score, scores, candidates)
    _check.finite_loss(loss, hidden=examples.hidden, log_z=examples.log_z, target_score=target_score, scores=scores)

    @torch.no_grad()
    def slot_weights() -> Tensor:
        form = head.objective.form
        assert form is not None
        log_z = (loss + transformed(form, target_score)).unsqueeze(1)
        return (scores + candidates.log_kappa(scores.dtype) - log_z).exp()

    return loss, slot_weights


def _root_mean_square(slot_weights: Tensor, candidates: Candidates) -> Tensor:
    """Return the root mean square over some of the examples of u/Z̃ [K], from κ u/Z̃ [B, K]."""
    some = slot_weights[:: -(-len(slot_weights) // OBSERVED_EXAMPLES)]
    return some.square().mean(0).sqrt_() * (-candidates.blocks[0].log_kappa[0]).exp()


@torch.no_grad()
def rmse_log_z(head: SampledHead, examples: Examples, *, seed: int) -> float:
    """Return the root-mean-square error of log Z̃ on a few examples, from the spread of a few draws.

    It needs no pass over all classes, and synchronises with the device. The draws have a separate generator, so that a
    training does not depend on how often it is measured. NaN if all of these examples are ignored.
    """
    generator = torch.Generator(examples.target.device).manual_seed(seed)
    few = examples.every(-(-len(examples.target) // PROBE_EXAMPLES))
    losses = []
    for _ in range(PROBE_DRAWS):
        candidates = draw_candidates(head, few, head.objective, generator)
        # The loss is log Z̃ minus the target's score, which is the same in all draws.
        losses.append(head.objective(*head.candidate_scores(few.hidden, few.target, candidates), candidates))
    variance = torch.stack(losses).double().var(0)
    return math.sqrt(variance.mean() if few.valid is None else variance[few.valid].mean())
