"""A head for any differentiable score of a class: two towers, features of classes, a network over both."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.defaults import IGNORE_INDEX
from manyclass.heads import _exact
from manyclass.heads._batch import flatten, wide
from manyclass.heads._exact import TopK
from manyclass.heads._sampled import approximate_log_likelihood, sampled_loss
from manyclass.kernels import exclude_hits
from manyclass.objectives import Likelihood, Objective
from manyclass.samplers import Sampler


class ScorerHead(nn.Module):
    """The losses of `ClassHead` over any u(c, x) = exp(scorer(x, c)).

    Args:
        scorer: a Module (or function) from hidden [G, S, ...] and ids [G, K] to scores [G, S, K]: G groups of S
            examples, each group with K classes of its own. A tower for classes runs once on ids [G, K], whatever
            S is, so candidates that a batch shares are encoded once.
        sampler: which classes a step scores; it knows their number.
        objective: what is maximised. Default: `Likelihood`.

    Example:
        >>> from manyclass.samplers import Importance
        >>> items = nn.Embedding(1000, 8)
        >>> def score(hidden, ids):
        ...     return hidden @ items(ids).transpose(1, 2)
        >>> head = ScorerHead(score, Importance(torch.ones(1000), k=20))
        >>> loss = head(torch.randn(4, 8), torch.tensor([1, 2, 3, 4]))
        >>> loss.backward()
    """

    def __init__(
        self, scorer: Callable[[Tensor, Tensor], Tensor], sampler: Sampler, *, objective: Objective | None = None
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.sampler = sampler
        self.objective = Likelihood() if objective is None else objective

    @property
    def num_classes(self) -> int:
        return self.sampler.num_classes

    def forward(
        self,
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
        """The loss of the objective over one draw of the sampler; arguments as of `ClassHead`.

        Args:
            hidden: whatever the scorer takes, [*target.shape, ...].
        """
        batch = flatten(
            hidden,
            target,
            self.num_classes,
            weight=weight,
            exclude=exclude,
            log_z=log_z,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        return batch.reduce(sampled_loss(self, batch, generator), reduction)

    def exact_loss(
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        exclude: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
    ) -> Tensor:
        """The exact cross entropy over all classes not excluded, in chunks."""
        batch = flatten(
            hidden,
            target,
            self.num_classes,
            weight=weight,
            exclude=exclude,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        target_score = self._own(batch.hidden, batch.target.unsqueeze(1)).squeeze(1)
        loss = _exact.log_z(self, batch.hidden, batch.exclude) - target_score
        _check.finite_loss(loss, hidden=batch.hidden, target_score=target_score)
        return batch.reduce(loss, reduction)

    def approximate_log_likelihood(
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        exclude: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log p̃(target) [...] from one draw, for monitoring under any objective; on average it flatters a little."""
        batch = flatten(hidden, target, self.num_classes, exclude=exclude)
        return approximate_log_likelihood(self, batch, generator).reshape(batch.shape)

    def scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Scores [B, K] of hidden [B, ...] for ids [B, K], or for ids [K] that all share."""
        ids = _check.ids("ids", ids, self.num_classes)
        if ids.dim() == 1:
            return wide(self.scorer(hidden.unsqueeze(0), ids.unsqueeze(0)).squeeze(0))
        return self._own(hidden, ids)

    def log_z(self, hidden: Tensor) -> Tensor:
        """The exact log Z [B] of hidden [B, ...]."""
        return _exact.log_z(self, hidden)

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Exact log-probabilities [B, K] of hidden [B, ...] for ids [B, K], or for ids [K] that all share."""
        return self.scores(hidden, ids) - self.log_z(hidden).unsqueeze(-1)

    def topk(self, hidden: Tensor, k: int, *, exclude: Tensor | None = None) -> TopK:
        """The k most probable classes of hidden [B, ...] that are not in exclude [B, E], exactly."""
        if exclude is not None:
            exclude = _check.ids("exclude", exclude, self.num_classes, pads=True)
        return _exact.topk(self, hidden, k, exclude)

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Scores of the targets [B] and of the candidates [B, ΣK], -inf where excluded."""
        scores = [
            block.ungroup(self.scorer(block.group(hidden), block.ids), len(hidden)) for block in candidates.blocks
        ]
        return self._own(hidden, target.unsqueeze(1)).squeeze(1), exclude_hits(scores, candidates)

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """For each run of `size` classes its first id and a function from hidden [B, ...] to scores [B, size]."""
        for start in range(0, self.num_classes, size):

            def score(hidden: Tensor, start: int = start) -> Tensor:
                ids = torch.arange(start, min(start + size, self.num_classes), device=hidden.device)
                return self.scorer(hidden.unsqueeze(0), ids.unsqueeze(0)).squeeze(0)

            yield start, score

    def class_gradient(self, hidden: Tensor, ids: Tensor, gamma: Tensor) -> Tensor:
        """Σ_b γ[b, u] ∂s(u)/∂θ over all ids [U], one row: the scorer's parameters θ belong to no class alone."""
        if not isinstance(self.scorer, nn.Module):
            raise TypeError(f"`scorer` must be a Module to have its gradient taken, got {type(self.scorer).__name__}")
        parameters = [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad((self.scores(hidden, ids) * gamma).sum(), parameters, allow_unused=True)
        return torch.cat([g.to_dense().reshape(1, -1) for g in gradients if g is not None], 1)

    def _own(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Scores [B, K] where each example has ids [K] of its own."""
        return wide(self.scorer(hidden.unsqueeze(1), ids).squeeze(1))
