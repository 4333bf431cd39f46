"""The distance of an approximation from the exact gradient, on live data."""

import math
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from manyclass import _check
from manyclass.candidates import Candidates, contained
from manyclass.forms import LogSumExp, transformed
from manyclass.heads import (
    ClassHead,
    Examples,
    SampledHead,
    draw_candidates,
    exact_log_z,
    exact_scores,
    examples_of_all,
    flatten_examples,
    scores_of_classes,
)


class DiagnosedHead(SampledHead, Protocol):
    """A head that can also compute the gradient of class parameters from given γ."""

    def class_gradient(self, hidden: Tensor, ids: Tensor, gamma: Tensor) -> Tensor:
        """Return Σ_b γ[b, u] ∂s(u)/∂θ for ids [U] and γ [B, U]."""
        ...


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`, over examples × draws unless stated otherwise.

    Args:
        rmse_log_z: root-mean-square of log Z̃ - log Z; None if the objective has no Z̃.
        bias_log_z: mean of log Z̃ - log Z; None if the objective has no Z̃.
        gamma_rmse: root-mean-square length of γ̃ - γ over all classes, those not scored (γ̃ = 0) included.
        sign_agreement: the share of components of the minibatch gradient, in the rows a draw touches, with the same
            sign as the exact gradient; mean over draws. NaN if the scores do not depend on any parameter.
        classes_scored: mean number of non-empty slots of an example, its target included.
        rows_touched: mean number of distinct rows a step scores.
    """

    rmse_log_z: float | None
    bias_log_z: float | None
    gamma_rmse: float
    sign_agreement: float
    classes_scored: float
    rows_touched: float

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            return "none: the objective has no Z̃" if value is None else f"{value:.4g}"

        return "\n".join(
            (
                f"error of log Z̃ (rms)       {shown(self.rmse_log_z)}",
                f"bias of log Z̃             {shown(self.bias_log_z)}",
                f"error of γ̃ (rms length)    {shown(self.gamma_rmse)}",
                f"gradient signs right       {self.sign_agreement:.1%}",
                f"classes scored an example  {self.classes_scored:.1f}",
                f"rows touched a step        {self.rows_touched:.1f}",
            )
        )


@torch.inference_mode(False)
@torch.no_grad()
def diagnose(
    head: DiagnosedHead,
    hidden: Tensor,
    target: Tensor,
    *,
    include: Tensor | None = None,
    exclude: Tensor | None = None,
    draws: int = 32,
    generator: torch.Generator | None = None,
) -> Diagnosis:
    """Compare a head's approximation with the exact likelihood on a batch, or on a probe of a few examples.

    The exact side costs one pass over all classes; each draw costs a step. Nothing is changed: neither gradients nor
    parameters, neither the sampler nor the global RNG state. If classes are divided among processes, all of them call
    it together, and get the result of all their examples.

    Args:
        head: any head with a sampler.
        hidden: [..., D].
        target: ids [...]; examples of target -100 are left out.
        include: ids [..., I] that each draw includes, as in the head's loss.
        exclude: ids [..., E] that neither the draws nor the exact likelihood sum.
        draws: the number of draws of the sampler to average over.
        generator: for the draws; None: a separate one, with the same seed in every call.

    Example:
        >>> from manyclass import ClassHead
        >>> from manyclass.samplers import Importance
        >>> head = ClassHead(8, 500, sampler=Importance(torch.ones(500), k=50))
        >>> report = diagnose(head, torch.randn(16, 8), torch.arange(16))
        >>> 0 < report.rmse_log_z < 1
        True
    """
    if not hasattr(head, "sampler"):
        raise TypeError(f"`head` must have a sampler to be diagnosed, got a {type(head).__name__}")
    _check.integer("draws", draws, 1)
    # Autograd cannot keep tensors that were made in inference mode; copies made outside it are ordinary ones.
    hidden, target = _check.tensor("hidden", hidden), _check.tensor("target", target)
    hidden, target = (x.clone() if x.is_inference() else x.detach() for x in (hidden, target))

    shard = head.shard

    def examples() -> Examples:
        head.check_hidden(hidden)
        options = {"include": include, "exclude": exclude, "may_be_empty": shard is not None}
        return flatten_examples(hidden, target, head.num_classes, **options)  # type: ignore[arg-type]

    batch = (examples() if shard is None else examples_of_all(shard, examples)[1]).present()
    if generator is None:
        generator = torch.Generator(hidden.device).manual_seed(0)
    own_score, log_z = exact_scores(head, batch.hidden, batch.target.unsqueeze(1), batch.exclude)
    exact_target = (own_score.squeeze(1) - log_z).exp()
    # Σ_c γ(c)² over all classes, from Σ_c p(c)²: γ is -p, but 1 - p at the target.
    squares = (exact_log_z(head, batch.hidden, batch.exclude, power=2.0) - 2 * log_z).exp() + 1 - 2 * exact_target
    held = torch.ones_like(batch.target, dtype=torch.bool) if shard is None else shard.holds(batch.target)
    error, squared, signs, scored, touched = [], [], [], [], []
    for _ in range(draws):
        candidates = draw_candidates(head, batch, head.objective, generator)
        loss, target_score, gamma_target, gamma_slots = _gamma(head, batch, candidates)
        if isinstance(form := head.objective.form, LogSumExp):
            error.append(loss + transformed(form, target_score) - log_z)
        # Sums over the classes of this process, which are added up if there are others.
        present = ~candidates.empty()
        ids = candidates.ids()
        classes = torch.cat([batch.target[held], ids[present]]).unique()
        # Zeros stand for the targets that another process holds.
        last = max(len(classes) - 1, 0)
        at_target = torch.searchsorted(classes, batch.target.contiguous()).clamp_(max=last).unsqueeze(1)
        # An empty slot may hold a class that is not among these; its γ is 0, so it may be added to any of them.
        place = torch.searchsorted(classes, ids.contiguous()).clamp_(max=last)
        approximate = torch.zeros(len(ids), max(len(classes), 1), dtype=gamma_slots.dtype, device=ids.device)
        approximate.scatter_add_(1, place, gamma_slots)
        approximate.scatter_add_(1, at_target, gamma_target.masked_fill(~held, 0.0).unsqueeze(1))
        approximate = approximate[:, : len(classes)]
        if shard is None:
            scores = head.scores(batch.hidden, classes)
        else:
            # Heads of other kinds are not divided.
            scores = scores_of_classes(cast("ClassHead", head), batch.hidden, classes)
        exact = -(scores - log_z.unsqueeze(1)).exp()
        if batch.exclude is not None:
            exact.masked_fill_(contained(classes.unsqueeze(0), batch.exclude.unsqueeze(0)).squeeze(0), 0.0)
        if len(classes):
            exact.scatter_add_(1, at_target, held.to(exact.dtype).unsqueeze(1))
        here, there = (head.class_gradient(batch.hidden, classes, gamma) for gamma in (approximate, exact))
        same = int((here.sign() == there.sign()).sum())
        numbers = [same, here.numel(), int(present.sum()), len(classes)]
        sums = torch.tensor(numbers, dtype=torch.float64, device=ids.device)
        missed = ((approximate - exact) ** 2 - exact**2).sum(1).double()
        if shard is not None:
            sums, missed = shard.summed(sums), shard.summed(missed)
        squared.append((squares + missed).clamp(min=0))
        agreeing, components, slots, rows = sums.tolist()
        signs.append(agreeing / components if components else math.nan)
        scored.append(slots / len(batch.target) + 1)
        touched.append(rows)
    errors = torch.stack(error).double() if error else None
    return Diagnosis(
        rmse_log_z=None if errors is None else float(errors.square().mean().sqrt()),
        bias_log_z=None if errors is None else float(errors.mean()),
        gamma_rmse=float(torch.stack(squared).double().mean().sqrt()),
        sign_agreement=math.fsum(signs) / draws,
        classes_scored=math.fsum(scored) / draws,
        rows_touched=math.fsum(touched) / draws,
    )


def _gamma(head: DiagnosedHead, batch: Examples, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses [B], target scores [B], and γ̃ = -∂loss/∂score of targets [B] and slots [B, ΣK]."""
    target_score, scores = head.candidate_scores(batch.hidden, batch.target, candidates)
    with torch.enable_grad():
        leaves = target_score.requires_grad_(), scores.requires_grad_()
        loss = head.objective(*leaves, candidates)
        gradients = torch.autograd.grad(loss.sum(), leaves)
    return loss.detach(), target_score.detach(), -gradients[0], -gradients[1]
