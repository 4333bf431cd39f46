"""A table of class vectors: the head that stands where nn.Linear and nn.CrossEntropyLoss stood."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.defaults import IGNORE_INDEX
from manyclass.heads import _exact
from manyclass.heads._batch import flatten, wide
from manyclass.heads._closed_form import closed_form
from manyclass.heads._default import choose_sampler
from manyclass.heads._exact import TopK
from manyclass.heads._resize import resize_rows, resize_state
from manyclass.heads._rows import RowLookup, observed
from manyclass.heads._sampled import approximate_log_likelihood, sampled_loss
from manyclass.kernels import exclude_hits, linear_scores
from manyclass.objectives import Likelihood, Objective
from manyclass.samplers import FollowingSampler, Sampler


class ClassHead(nn.Module):
    """Scores s(c) = w_c · hidden + b_c for C classes, and a loss that scores only a sampler's candidates.

    Args:
        dim: D, the length of `hidden`.
        num_classes: C.
        counts: how often each class occurs. The bias starts at the log frequency, and the default sampler uses it.
        sampler: which classes a step scores. Default: `Learned` from the counts; every class where there are no more
            than k; `Systematic` with uniform weights where there are no counts.
        k: classes that the default sampler draws, 1024 if not said; or "auto": as many as `rmse_log_z` takes.
        rmse_log_z: the error of log Z̃ that "auto" is to keep to (`Budget`). Default: 0.1.
        objective: what is maximised. Default: `Likelihood`.
        bias: whether classes have a bias.
        similarity: "dot", or "cosine": s(c) = scale · cos(w_c, hidden) + b_c.
        scale: of the cosine.
        update: which rows learn: "scored", all that a step scores, or "observed", only the classes of its targets.
        sparse: whether the gradients of weight and bias are row-sparse.
        weight: a parameter [C, D] to share instead of a new one.
        device, dtype: of the parameters.

    Raises:
        ValueError: sizes that do not fit each other, or an option that does not exist.

    Example:
        >>> head = ClassHead(8, 100_000, counts=torch.ones(100_000))
        >>> hidden, target = torch.randn(4, 8), torch.tensor([3, 14, 15, 92653])
        >>> loss = head(hidden, target)
        >>> loss.backward()
        >>> head.topk(hidden, 5).ids.shape
        torch.Size([4, 5])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        counts: ClassCounts | Tensor | None = None,
        sampler: Sampler | None = None,
        k: int | str | None = None,
        rmse_log_z: float | None = None,
        objective: Objective | None = None,
        bias: bool = True,
        similarity: str = "dot",
        scale: float = 16.0,
        update: str = "scored",
        sparse: bool = False,
        weight: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = _check.whole("dim", dim, 1)
        _check.whole("num_classes", num_classes, 1)
        _check.choice("similarity", similarity, ("dot", "cosine"))
        _check.choice("update", update, ("scored", "observed"))
        self.similarity = similarity
        self.scale = _check.number("scale", scale, low=0, strict=True)
        self.update = update
        self.sparse = sparse
        if weight is None:
            weight = nn.Parameter(_initial_rows(num_classes, dim, device=device, dtype=dtype))
        else:
            _check.shape("weight", weight, (num_classes, dim))
        self.weight = weight
        counts = None if counts is None else ClassCounts.of(counts, num_classes)
        self.register_parameter("bias", None)
        if bias:
            start = torch.zeros(num_classes) if counts is None else counts.frequency().log()
            self.bias = nn.Parameter(start.to(weight))
        self.use(choose_sampler(sampler, num_classes, counts, k=k, rmse_log_z=rmse_log_z))
        self.objective = Likelihood() if objective is None else objective
        self._rows = RowLookup(self.weight, sparse=sparse)
        self._biases = None if self.bias is None else RowLookup(self.bias, sparse=sparse)
        self._tied: tuple[nn.Embedding, ...] = ()

    @classmethod
    def tied(
        cls,
        embedding: nn.Embedding,
        *,
        counts: ClassCounts | Tensor | None = None,
        sampler: Sampler | None = None,
        k: int | str | None = None,
        rmse_log_z: float | None = None,
        objective: Objective | None = None,
        bias: bool = True,
        similarity: str = "dot",
        scale: float = 16.0,
        update: str = "scored",
        sparse: bool | None = None,
    ) -> "ClassHead":
        """A head whose class vectors are the rows of an embedding. `sparse` is the embedding's own.

        Raises:
            ValueError: `sparse` differs from the embedding's: torch would silently turn the sum of a dense and a
                sparse gradient into a dense one of the whole table. Or the embedding rescales its rows (`max_norm`).
        """
        if sparse is not None and sparse != embedding.sparse:
            raise ValueError(
                f"`sparse` must be the embedding's, {embedding.sparse}, got {sparse}: the sum of a dense and a sparse "
                "gradient is dense"
            )
        if not isinstance(embedding.weight, nn.Parameter):
            raise TypeError(f"`embedding` must own its weight, got a {type(embedding.weight).__name__}")
        if embedding.max_norm is not None:
            raise ValueError(f"`embedding` must not rescale its rows, got max_norm={embedding.max_norm}")
        head = cls(
            embedding.embedding_dim,
            embedding.num_embeddings,
            counts=counts,
            sampler=sampler,
            k=k,
            rmse_log_z=rmse_log_z,
            objective=objective,
            bias=bias,
            similarity=similarity,
            scale=scale,
            update=update,
            sparse=embedding.sparse,
            weight=embedding.weight,
        )
        # In a tuple, lest the embedding become a submodule.
        head._tied = (embedding,)
        return head

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

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
        """The loss of the objective over one draw of the sampler.

        Args:
            hidden: [..., D].
            target: ids [...].
            weight: of each example [...]; the mean is divided by their sum.
            exclude: ids [..., E], -1 pads: classes that must not count as negatives of that example.
            log_z: [...], the log normaliser of each example where the objective (NoiseContrastive) has one.
            ignore_index: a target that takes its example out of the loss.
            reduction: "mean", "sum" or "none".
            generator: for the draw.
        """
        self._check_hidden(hidden)
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
        return batch.reduce(sampled_loss(self, batch, generator, closed_form=partial(closed_form, self)), reduction)

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
        """The exact cross entropy over all classes not excluded, in chunks. Its gradients are dense."""
        self._check_hidden(hidden)
        batch = flatten(
            hidden,
            target,
            self.num_classes,
            weight=weight,
            exclude=exclude,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        rows, bias = F.embedding(batch.target, self.weight), None if self.bias is None else self.bias[batch.target]
        loss = _exact.log_z(self, batch.hidden, batch.exclude) - self._pair(batch.hidden, rows, bias)
        _check.finite_loss(loss, hidden=batch.hidden, weight=self.weight, bias=self.bias)
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
        self._check_hidden(hidden)
        batch = flatten(hidden, target, self.num_classes, exclude=exclude)
        return approximate_log_likelihood(self, batch, generator).reshape(batch.shape)

    def scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Scores [..., K] of hidden [..., D] for ids [..., K], or for ids [K] that all share."""
        self._check_hidden(hidden)
        ids = _check.ids("ids", ids, self.num_classes)
        rows, bias = self._lookup(ids)
        hidden, rows = self._directions(hidden), self._directions(rows, scaled=False)
        scores = hidden @ rows.T if ids.dim() == 1 else (rows @ hidden.unsqueeze(-1)).squeeze(-1)
        return wide(scores if bias is None else scores + bias)

    def log_z(self, hidden: Tensor) -> Tensor:
        """The exact log Z [...] of hidden [..., D]."""
        self._check_hidden(hidden)
        return _exact.log_z(self, hidden.reshape(-1, self.dim)).reshape(hidden.shape[:-1])

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Exact log-probabilities [..., K] of hidden [..., D] for ids [..., K], or for ids [K] that all share."""
        return self.scores(hidden, ids) - self.log_z(hidden).unsqueeze(-1)

    def topk(self, hidden: Tensor, k: int, *, exclude: Tensor | None = None) -> TopK:
        """The k most probable classes of hidden [..., D] that are not in exclude [..., E], exactly."""
        self._check_hidden(hidden)
        shape = hidden.shape[:-1]
        if exclude is not None:
            exclude = _check.ids("exclude", exclude, self.num_classes, pads=True)
            exclude = exclude.reshape(-1, exclude.shape[-1])
        best = _exact.topk(self, hidden.reshape(-1, self.dim), k, exclude)
        return TopK(best.log_prob.reshape(*shape, k), best.ids.reshape(*shape, k))

    def to_linear(self) -> nn.Linear:
        """An nn.Linear that shares the parameters, for code that wants all logits.

        Raises:
            ValueError: the similarity is "cosine", which no linear layer computes.
        """
        if self.similarity != "dot":
            raise ValueError(f"`similarity` must be 'dot' for a linear layer, got {self.similarity!r}")
        linear = nn.Linear(self.dim, self.num_classes, bias=self.bias is not None, device="meta")
        linear.weight = self.weight
        linear.register_parameter("bias", self.bias)
        return linear

    def resize(
        self,
        num_classes: int,
        *,
        sampler: Sampler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Add classes behind the others, or retire the last ones, with their sampler's and optimiser's state.

        New rows start as they do in a new head; their bias is that of the rarest class.

        Args:
            num_classes: the new C.
            sampler: for the new classes; None: the present one follows by itself, which it can if it was built from
                ClassCounts (new classes have not been seen).
            optimizer: whose state of the head's parameters is to follow.
        """
        _check.whole("num_classes", num_classes, 1)
        # The sampler first: if it cannot follow, nothing has changed yet.
        if sampler is None:
            self.sampler.resize(num_classes)
        elif sampler.num_classes != num_classes:
            raise ValueError(f"`sampler` must draw from {num_classes} classes, got {sampler.num_classes}")
        old = self.num_classes
        added = max(0, num_classes - old)
        resize_rows(self.weight, _initial_rows(added, self.dim), num_classes)
        if self.bias is not None:
            resize_rows(self.bias, self.bias.data.min().expand(added), num_classes)
        for embedding in self._tied:
            embedding.num_embeddings = num_classes
        # One that follows the class vectors must see as many as it has classes.
        self.use(self.sampler if sampler is None else sampler)
        if optimizer is not None:
            for parameter in self.parameters(recurse=False):
                resize_state(optimizer, parameter, old)

    def use(self, sampler: Sampler) -> None:
        """Draw with this sampler from now on. One that looks at class vectors is shown the head's."""
        if sampler.num_classes != self.num_classes:
            raise ValueError(f"`sampler` must draw from {self.num_classes} classes, got {sampler.num_classes}")
        self.sampler = sampler.to(self.weight.device)
        if isinstance(sampler, FollowingSampler):
            sampler.follow(self.weight, self.bias)

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Scores of the targets [B] and of the candidates [B, ΣK], -inf where excluded."""
        flat = torch.cat([block.ids.reshape(-1) for block in candidates.blocks])
        if self.update == "observed":
            target_rows, target_bias = self._lookup(target)
            with torch.no_grad():
                rows, bias = self._lookup(flat)
            learn = observed(flat, target)
            rows = learn(rows, target_rows)
            bias = None if bias is None or target_bias is None else learn(bias, target_bias)
        else:
            # One look-up for all, so that there is one gradient.
            rows, bias = self._lookup(torch.cat([target, flat]))
            sizes = [len(target), len(flat)]
            target_rows, rows = rows.split(sizes)
            target_bias, bias = (None, None) if bias is None else bias.split(sizes)
        target_score = self._pair(hidden, target_rows, target_bias)
        hidden, rows = self._directions(hidden), self._directions(rows, scaled=False)
        sizes = [block.ids.numel() for block in candidates.blocks]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        scores = [
            linear_scores(hidden, part, part_bias, block)
            for block, part, part_bias in zip(candidates.blocks, rows.split(sizes), biases, strict=True)
        ]
        return target_score, exclude_hits(scores, candidates)

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """For each run of `size` classes its first id and a function from hidden [B, D] to scores [B, size]."""
        # Split, not sliced: the gradients of slices would each be a table of their own.
        rows = self.weight.split(size)
        biases = (None,) * len(rows) if self.bias is None else self.bias.split(size)
        for i, (part, bias) in enumerate(zip(rows, biases, strict=True)):

            def score(hidden: Tensor, part: Tensor = part, bias: Tensor | None = bias) -> Tensor:
                return F.linear(self._directions(hidden), self._directions(part, scaled=False), bias)

            yield i * size, score

    def class_gradient(self, hidden: Tensor, ids: Tensor, gamma: Tensor) -> Tensor:
        """Σ_b γ[b, u] ∂s(u)/∂w_u for ids [U] and γ [B, U]: a row [D] for each class, with its bias [D + 1]."""
        rows = self.weight.detach()[ids].requires_grad_()
        scores = self._directions(hidden) @ self._directions(rows, scaled=False).T
        (gradient,) = torch.autograd.grad((scores * gamma).sum(), rows)
        return gradient if self.bias is None else torch.cat([gradient, gamma.sum(0).unsqueeze(1)], 1)

    def _lookup(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = self._rows(self.weight, ids)
        return rows, None if self.bias is None or self._biases is None else self._biases(self.bias, ids)

    def _directions(self, x: Tensor, *, scaled: bool = True) -> Tensor:
        """Vectors as the similarity takes them: as they are, or of unit length times the scale."""
        if self.similarity == "dot":
            return x
        unit = F.normalize(wide(x), dim=-1).to(x.dtype)
        return unit * self.scale if scaled else unit

    def _pair(self, hidden: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Scores [B] of hidden [B, D] with a row each [B, D]."""
        hidden, rows = wide(self._directions(hidden)), wide(self._directions(rows, scaled=False))
        score = (hidden * rows).sum(-1)
        return score if bias is None else score + bias

    def _check_hidden(self, hidden: Tensor) -> None:
        _check.tensor("hidden", hidden)
        if hidden.dim() == 0 or hidden.shape[-1] != self.dim:
            raise ValueError(f"`hidden` must have shape [..., {self.dim}], got {list(hidden.shape)}")
        _check.device("hidden", hidden, self.weight.device)
        if hidden.dtype != self.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise ValueError(
                f"`hidden` must have the head's dtype, {self.weight.dtype}, outside autocast, got {hidden.dtype}"
            )

    def extra_repr(self) -> str:
        similarity = "" if self.similarity == "dot" else f", similarity='cosine', scale={self.scale:g}"
        return (
            f"dim={self.dim}, num_classes={self.num_classes}, bias={self.bias is not None}{similarity}, "
            f"update={self.update!r}, sparse={self.sparse}, objective={self.objective!r}"
        )


def _initial_rows(
    rows: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Rows as nn.Linear starts them."""
    bound = 1 / math.sqrt(dim)
    return torch.empty(rows, dim, device=device, dtype=dtype).uniform_(-bound, bound)
