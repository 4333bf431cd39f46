"""A head for any differentiable score: two towers, class features, a network over both."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyclass import _check
from manyclass._handle import Handle
from manyclass.candidates import Candidates
from manyclass.heads._learning import probe_of
from manyclass.heads._probe import exhaustive_seconds
from manyclass.heads._rows import gathered, is_sharded
from manyclass.heads.exact import TopK, exact_log_prob, exact_log_z, exact_topk
from manyclass.heads.examples import Examples
from manyclass.heads.sampled import approximate_log_likelihood, exact_loss, sampled_loss
from manyclass.kernels import at_least_float32, exclude_hits
from manyclass.objectives import Likelihood, Objective
from manyclass.samplers import ErrorProbe, Sampler, check_life_cycle


class ScorerHead(nn.Module):
    """A head with the losses of `ClassHead` over any u(c, x) = exp(scorer(x, c)).

    Args:
        scorer: a Module (or function) from hidden [G, S, ...] and ids [G, K] to scores [G, S, K]: G groups of S
            examples, each group with its K classes. A tower for classes runs once on ids [G, K], whatever S is, so
            candidates that a batch shares are encoded once. `parameters()` of the head has the parameters of a Module,
            but not those that a function refers to: give these to the optimiser yourself.
        sampler: chooses the classes that a step scores, and determines C.
        objective: the training objective. Default: `Likelihood`.

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
        check_life_cycle(sampler)
        self.scorer = scorer
        self.sampler = sampler
        self.objective = Likelihood() if objective is None else objective
        self.handle = Handle(self)
        self.own_probe, self.extra_probes = ErrorProbe(), list[ErrorProbe]()

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        return self.sampler.num_classes

    @property
    def tables(self) -> dict[str, Tensor | None]:
        """No class parameters: they are the scorer's."""
        return {}

    @property
    def shard(self) -> None:
        """None: the classes of a scorer are not divided among processes."""

    @property
    def class_vectors(self) -> tuple[None, None]:
        """None: the scorer alone knows its parameters."""
        return None, None

    @property
    def probe(self) -> ErrorProbe:
        """The error of log Z̃ in training, measured at 1 % of its work after some steps; `probe.error` is in nats."""
        return probe_of(self)

    forward = sampled_loss
    exact_loss = exact_loss
    approximate_log_likelihood = approximate_log_likelihood

    def check_hidden(self, hidden: Tensor) -> None:
        """Accept anything: only the scorer knows its input."""

    def fused_loss(self, examples: Examples, candidates: Candidates) -> None:
        """Return None: there are no kernels for a scorer."""

    def exact_losses(self, examples: Examples) -> None:
        """Return None: there are no kernels for a scorer."""

    def fastest_exact(self, examples: Examples) -> tuple[None, float]:
        """Return the seconds of the exact loss of the examples and its gradients; there is one way."""
        return None, exhaustive_seconds(self, examples)

    def scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return scores [B, K] of hidden [B, ...] for ids [B, K], or for ids [K] that all examples share."""
        ids = _check.ids("ids", ids, self.num_classes)
        if ids.dim() == 1:
            return at_least_float32(self._score(hidden.unsqueeze(0), ids.unsqueeze(0)).squeeze(0))
        return self._own(hidden, ids)

    def log_z(self, hidden: Tensor) -> Tensor:
        """Return the exact log Z [B] of hidden [B, ...]."""
        return exact_log_z(self, hidden)

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return exact log-probabilities [B, K] for ids [B, K], or for ids [K] that all examples share."""
        return exact_log_prob(self, hidden, ids, hidden.shape[:1])

    def topk(self, hidden: Tensor, k: int, *, exclude: Tensor | None = None) -> TopK:
        """Return exactly the k most probable classes of hidden [B, ...] that are not in exclude [B, E]."""
        if exclude is not None:
            exclude = _check.ids("exclude", exclude, self.num_classes, pads=True)
        return exact_topk(self, hidden, k, exclude)

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return scores of the targets [B] and of the candidates [B, ΣK + I], -inf where excluded."""
        blocks = candidates.parts(empty=target)
        scores = [block.ungroup(self._score(block.group(hidden), block.ids), len(hidden)) for block in blocks]
        if blocks and blocks[0].has_targets:
            target_score = at_least_float32(scores[0].diagonal())
        else:
            target_score = self._own(hidden, target.unsqueeze(1)).squeeze(1)
        return target_score, exclude_hits(scores, candidates)

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """Yield for each run of `size` classes its first id and a function from hidden [B, ...] to scores [B, size]."""
        for start in range(0, self.num_classes, size):

            def score(hidden: Tensor, start: int = start) -> Tensor:
                ids = torch.arange(start, min(start + size, self.num_classes), device=hidden.device)
                return self._score(hidden.unsqueeze(0), ids.unsqueeze(0)).squeeze(0)

            yield start, score

    def class_gradient(self, hidden: Tensor, ids: Tensor, gamma: Tensor) -> Tensor:
        """Return Σ_b γ[b, u] ∂s(u)/∂θ over all ids [U], one row: the scorer's parameters θ are shared by all classes.

        There are no columns if the scores do not depend on any parameter.
        """
        with torch.enable_grad():
            total = (self.scores(hidden, ids) * gamma).sum()
        parameters = _leaves(total)
        gradients = torch.autograd.grad(total, parameters) if parameters else ()
        return torch.cat([gamma.new_empty(1, 0), *(gathered(g).to_dense().reshape(1, -1) for g in gradients)], 1)

    def _score(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Call the scorer, with whole parameters: outside `forward`, `fully_shard` leaves them in parts."""
        if isinstance(self.scorer, nn.Module) and dist.is_available() and dist.is_initialized():
            tables = list(self.scorer.named_parameters())
            if any(is_sharded(table) for _, table in tables):
                whole = {name: gathered(table) for name, table in tables}
                found: Tensor = torch.func.functional_call(self.scorer, whole, (hidden, ids))
                return found
        return self.scorer(hidden, ids)

    def _own(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return scores [B, K] for ids [B, K], separate ones for each example."""
        return at_least_float32(self._score(hidden.unsqueeze(1), ids).squeeze(1))


def _leaves(value: Tensor) -> list[Tensor]:
    """Return the parameters that a value depends on, in the order of its graph: a function does not list them."""
    found: list[Tensor] = []
    seen, nodes = set(), [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes.extend(parent for parent, _ in node.next_functions)
    return found
