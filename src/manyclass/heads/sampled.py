"""The losses of a head with a sampler, the same for every way to score a class."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from manyclass import _check, _ranks
from manyclass._context import is_checkpointed, is_functional, is_in_backward
from manyclass._recording import present
from manyclass.candidates import Candidates
from manyclass.defaults import IGNORE_INDEX
from manyclass.forms import transformed
from manyclass.heads._learning import LearningHead, advance, draw_candidates, observe
from manyclass.heads._probe import estimates_log_z
from manyclass.heads._together import loss_together
from manyclass.heads.exact import exact_scores
from manyclass.heads.examples import Examples, flatten_examples
from manyclass.kernels import implementation
from manyclass.objectives import Likelihood

OBSERVED_EXAMPLES = 256  # at most, in an observation: all of a large batch would cost a quarter of the step


class SampledHead(LearningHead, Protocol):
    """A head whose loss combines a sampler and an objective, and which can also compute the exact loss."""

    @property
    def tables(self) -> Mapping[str, Tensor | None]:
        """The class parameters by name, whole, for errors."""
        ...

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise if the head cannot score `hidden`."""
        ...

    def fused_loss(self, examples: Examples, candidates: Candidates) -> tuple[Tensor, Tensor | None] | None:
        """Return losses [B], 0 if ignored, and, if known, ∂loss/∂s [B, K] from a kernel; None: there is none."""
        ...

    def exact_losses(self, examples: Examples) -> Tensor | None:
        """Return the losses [B] over all classes from a kernel; None if there is none."""
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
    include: Tensor | None = None,
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
        include: ids [..., I], -1 pads: classes that are candidates of that example in every draw, each for itself
            alone (κ = 1): hard negatives, the items of a session. A repeated class counts once, the target only if the
            objective keeps hits.
        exclude: ids [..., E], -1 pads: classes that must not count as negatives of that example, even if included.
        log_z: [...], the log normaliser of each example, for an objective that has one (NoiseContrastive).
        ignore_index: the target of examples that are left out of the loss.
        reduction: "mean", "sum" or "none".
        generator: for the draw; None: torch's global generator, which torch.utils.checkpoint needs.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype, device or value; the message names it.
    """
    _ranks.check_prepared(self)

    def flattened() -> Examples:
        self.check_hidden(hidden)
        return flatten_examples(
            hidden,
            target,
            self.num_classes,
            weight=weight,
            include=include,
            exclude=exclude,
            log_z=log_z,
            ignore_index=ignore_index,
            reduction=reduction,
            may_be_empty=self.shard is not None,
        )

    # A scorer has no such option.
    with implementation(getattr(self, "impl", "auto")):
        if self.shard is not None:
            return loss_together(self.shard, flattened, lambda everyone: _losses(self, everyone, generator), reduction)
        examples = flattened()
        if examples.valid is None or is_functional() or not _check.reads_values(target) or not examples.valid.any():
            return examples.reduce(_losses(self, examples, generator), reduction)
        # Padded sequences may be ignored for the most part. Where reading values costs nothing, only the others are
        # scored.
        loss = _losses(self, examples.present(), generator)
        return examples.reduce(loss.new_zeros(len(examples.valid)).masked_scatter(examples.valid, loss), reduction)


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

    The gradients of a table of class vectors are dense. Arguments are those of the sampled loss, but for `include`:
    every class is included.
    """

    def flattened() -> Examples:
        self.check_hidden(hidden)
        return flatten_examples(
            hidden,
            target,
            self.num_classes,
            weight=weight,
            exclude=exclude,
            ignore_index=ignore_index,
            reduction=reduction,
            may_be_empty=self.shard is not None,
        )

    def losses(examples: Examples) -> Tensor:
        loss = self.exact_losses(examples)
        if loss is None:
            target_score, log_z = exact_scores(self, examples.hidden, examples.target.unsqueeze(1), examples.exclude)
            loss = log_z - target_score.squeeze(1)
        _check.finite_loss(loss, hidden=examples.hidden, **self.tables)
        return examples.without_ignored(loss)

    if self.shard is not None:
        return loss_together(self.shard, flattened, losses, reduction)
    examples = flattened()
    return examples.reduce(losses(examples), reduction)


def approximate_log_likelihood(
    self: SampledHead,
    hidden: Tensor,
    target: Tensor,
    *,
    include: Tensor | None = None,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the paper's estimate of log p(target) [...] from one draw, for monitoring under any objective.

    On average it is a little too high. Without a generator it draws from torch's global one.
    """

    def flattened() -> Examples:
        self.check_hidden(hidden)
        options = {"include": include, "exclude": exclude, "may_be_empty": self.shard is not None}
        return flatten_examples(hidden, target, self.num_classes, **options)  # type: ignore[arg-type]

    def losses(examples: Examples) -> Tensor:
        likelihood = Likelihood()
        candidates = draw_candidates(self, examples, likelihood, generator)
        return likelihood(*self.candidate_scores(examples.hidden, examples.target, candidates), candidates)

    with torch.no_grad():
        if self.shard is not None:
            return -loss_together(self.shard, flattened, losses, "none")
        examples = flattened()
        return -losses(examples).reshape(examples.shape)


def _losses(head: SampledHead, examples: Examples, generator: torch.Generator | None) -> Tensor:
    """Return losses [B] over one draw, 0 for ignored examples.

    In training the sampler advances before the draw, and observes it.
    """
    objective = head.objective
    if examples.log_z is not None and not objective.normalised:
        raise ValueError(f"`log_z` must be None for {objective!r}, which has no z, got a tensor")
    # A checkpoint calls the head twice a step. The sampler must learn once, and draw the same candidates again.
    if not torch.compiler.is_compiling() and (recording := present()) is not None:
        recording.add_head(head, compiled=False)
        recording.add_generator(generator)
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    recomputed, checkpointed = eager and is_in_backward(), eager and is_checkpointed()
    if generator is not None and (recomputed or checkpointed):
        raise ValueError(
            "`generator` must be None inside torch.utils.checkpoint, which restores only torch's global RNG state for "
            "the recomputation, got a generator: seed with torch.manual_seed instead"
        )
    # A transform of torch.func is not a step of training.
    trains = head.training and torch.is_grad_enabled() and not is_functional() and not (recomputed and checkpointed)
    if trains and not recomputed:
        advance(head, examples)
    candidates = draw_candidates(head, examples, objective, generator, attached=trains and not recomputed)
    loss, slot_weights = _fused(head, examples, candidates) or _eager(head, examples, candidates)
    if trains and recomputed:
        # With `use_reentrant=True` the forward pass has no gradients, so the sampler learns in the recomputation, and
        # advances after the draw, which must equal that of the forward pass.
        advance(head)
        # In a backward pass no DDP is active: without an exchange, ranks would learn different probabilities.
        trains = not _ranks.are_several()
    if trains and estimates_log_z(objective):
        observe(head, examples, candidates, loss.detach(), lambda: _root_mean_square(slot_weights(), candidates))
    return loss


def _fused(head: SampledHead, examples: Examples, candidates: Candidates) -> tuple[Tensor, Callable[[], Tensor]] | None:
    """Return losses [B] and a function that returns κ u/Z̃ [B, K], from a kernel."""
    found = head.fused_loss(examples, candidates)
    # On NaN, rerun eagerly: that path names the bad input.
    if found is None or (_check.reads_values(found[0]) and math.isnan(found[0].detach().sum().item())):
        return None
    loss, score_gradient = found

    @torch.no_grad()
    def slot_weights() -> Tensor:
        # For the log-sum-exp form ∂loss/∂s of a slot is κ u/Z̃.
        return _eager(head, examples, candidates)[1]() if score_gradient is None else score_gradient

    return loss, slot_weights


def _eager(head: SampledHead, examples: Examples, candidates: Candidates) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return losses [B] and a function that returns κ u/Z̃ [B, K], by autograd."""
    target_score, scores = head.candidate_scores(examples.hidden, examples.target, candidates)
    if examples.log_z is not None:
        of_target = examples.log_z
        if head.shard is not None:
            # Every process has the whole gradient of the target's score, and that of its part of the slots.
            of_target = head.shard.averaged(of_target)
        target_score, scores = target_score - of_target, scores - examples.log_z.unsqueeze(1)
    loss: Tensor = head.objective(target_score, scores, candidates)
    _check.finite_loss(loss, hidden=examples.hidden, log_z=examples.log_z, target_score=target_score, scores=scores)

    @torch.no_grad()
    def slot_weights() -> Tensor:
        form = head.objective.form
        assert form is not None
        log_z = (loss + transformed(form, target_score)).unsqueeze(1)
        return (scores + candidates.log_kappa(scores.dtype) - log_z).exp()

    return examples.without_ignored(loss), slot_weights


def _root_mean_square(slot_weights: Tensor, candidates: Candidates) -> Tensor:
    """Return the root mean square of u/Z̃ [ΣK] over examples of each block's first group, from κ u/Z̃ [B, ΣK + I]."""
    found, first = [], 0
    # Slots of included classes, which follow those of the blocks, are not shared.
    for block in candidates.blocks:
        size, end = -(-len(slot_weights) // block.ids.shape[0]), first + block.ids.shape[1]
        group = slot_weights[:size] if block.order is None else slot_weights[block.order[:size]]
        some = group[:: -(-size // OBSERVED_EXAMPLES), first:end]
        found.append(some.square().mean(0).sqrt_() * (-block.log_kappa[0]).exp())
        first = end
    return torch.cat(found)
