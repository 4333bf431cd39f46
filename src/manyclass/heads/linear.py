"""A head with a table of class vectors, in place of nn.Linear and nn.CrossEntropyLoss."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._handle import Handle
from manyclass._shard import Shard
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.forms import Similarity
from manyclass.heads._default import choose_sampler, known_frequency
from manyclass.heads._divided import (
    log_prob_together,
    log_z_together,
    scores_of_part,
    scores_together,
    topk_together,
)
from manyclass.heads._fused import exact_losses, fastest_exact, fused_loss
from manyclass.heads._learning import probe_of
from manyclass.heads._resize import resize_rows, resize_state
from manyclass.heads._rows import RowLookup, fill_, gathered, is_sharded, replace_target_rows
from manyclass.heads.exact import TopK, exact_log_prob, exact_log_z, exact_topk
from manyclass.heads.sampled import approximate_log_likelihood, exact_loss, sampled_loss
from manyclass.kernels import IMPLS, at_least_float32, directions, exclude_hits, linear_scores
from manyclass.objectives import Likelihood, Objective
from manyclass.samplers import ErrorProbe, Sampler, check_life_cycle, score_by


class ClassHead(nn.Module):
    """A head with scores s(c) = w_c · hidden + b_c of C classes, whose loss scores only a sampler's candidates.

    Args:
        dim: D, the length of `hidden`.
        num_classes: C.
        counts: the count of each class. The bias starts at the log frequency, and the default sampler uses it. None:
            those of `sampler`, if it has any.
        sampler: chooses the classes that a step scores. Default: `Automatic`, which decides in training, by time and
            error, whether to score all classes, draw some from the counts, or draw for each batch; all classes if
            there are at most 1,024, or at most k.
        k: draw this number of classes with `Learned` instead. None or "auto": as the default sampler decides.
        rmse_log_z: the error of log Z̃ that the default sampler keeps below. Default: 0.15 nats.
        objective: the training objective. Default: `Likelihood`.
        bias: whether classes have a bias.
        similarity: "dot", or "cosine": s(c) = scale · cos(w_c, hidden) + b_c.
        scale: the factor of the cosine.
        update: the rows that learn: "scored", all that a step scores, or "observed", only the classes of its targets.
        sparse: whether the gradients of weight and bias are row-sparse.
        impl: the implementation of the loss: "eager" by torch's operators; "triton" by kernels on a GPU, for objectives
            of one of the two forms without a transform of the target's score, and draws of at most three blocks, else
            by torch's operators; it also draws combs (`Systematic`, `Learned`) and replaces ignored targets by kernels.
            "auto" by compiled kernels on the CPU, and as "triton" on a GPU. torch.compile traces torch's operators,
            but with "triton" the loss of a draw is an operator that launches the kernels.
        weight: a parameter [C, D] to share instead of a new one.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: a size does not fit the others, or an option does not exist.

    Example:
        >>> head = ClassHead(8, 100_000, counts=torch.ones(100_000))
        >>> hidden, target = torch.randn(4, 8), torch.tensor([3, 14, 15, 92653])
        >>> loss = head(hidden, target)
        >>> loss.backward()
        >>> head.topk(hidden, 5).ids.shape
        torch.Size([4, 5])
    """

    bias: nn.Parameter | None
    # For heads that were pickled before these existed.
    impl: str = "auto"
    shard: Shard | None = None

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
        impl: str = "auto",
        weight: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = _check.integer("dim", dim, 1)
        _check.integer("num_classes", num_classes, 1)
        _check.choice("similarity", similarity, ("dot", "cosine"))
        _check.choice("update", update, ("scored", "observed"))
        _check.choice("impl", impl, IMPLS)
        self.similarity = similarity
        self.scale = _check.number("scale", scale, low=0, strict=True)
        self.update = update
        self.impl = impl
        self.sparse = sparse
        self._shares_weight = weight is not None
        if weight is None:
            weight = nn.Parameter(_initial_rows(num_classes, dim, device=device, dtype=dtype))
        else:
            _check.shape("weight", weight, (num_classes, dim))
        self.weight = weight
        counts = None if counts is None else ClassCounts.of(counts, num_classes)
        # In tuples: as attributes these modules would be registered as submodules.
        self._counts = () if counts is None else (counts,)
        self._tied: tuple[nn.Embedding, ...] = ()
        self.register_parameter("bias", None)
        sampler = choose_sampler(sampler, num_classes, counts, k=k, rmse_log_z=rmse_log_z)
        if bias:
            self.bias = nn.Parameter(self._initial_bias(sampler).to(weight))
        self.handle = Handle(self)
        self.own_probe, self.extra_probes = ErrorProbe(), list[ErrorProbe]()
        self.use(sampler)
        self.objective = Likelihood() if objective is None else objective
        self._rows = RowLookup(self, "weight", sparse=sparse)
        self._biases = None if self.bias is None else RowLookup(self, "bias", sparse=sparse)

    @classmethod
    def tied(cls, embedding: nn.Embedding, **options: Any) -> "ClassHead":
        """Make a head whose class vectors are the rows of an embedding.

        Args:
            embedding: owns the rows and decides whether gradients are sparse.
            options: keyword arguments of `ClassHead`.

        Raises:
            TypeError: the embedding does not own its weight.
            ValueError: `sparse` differs from the embedding's, so that torch would silently turn the sum of a dense and
                a sparse gradient into a dense one of the whole table; or the embedding rescales its rows (`max_norm`).
        """
        sparse = options.pop("sparse", None)
        if sparse is not None and sparse != embedding.sparse:
            raise ValueError(
                f"`sparse` must be the embedding's, {embedding.sparse}, got {sparse}: the sum of a dense and a sparse "
                "gradient is dense"
            )
        if not isinstance(embedding.weight, nn.Parameter):
            raise TypeError(f"`embedding` must own its weight, got a {type(embedding.weight).__name__}")
        if embedding.max_norm is not None:
            raise ValueError(f"`embedding` must not rescale its rows, got max_norm={embedding.max_norm}")
        rows, dim = embedding.num_embeddings, embedding.embedding_dim
        head = cls(dim, rows, weight=embedding.weight, sparse=embedding.sparse, **options)
        head._tied = (embedding,)
        return head

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; copied parameters do not know which rows they hold."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.shard is not None:
            for table in self.parameters(recurse=False):
                self.shard.mark(table)

    def reset_parameters(self) -> None:
        """Initialise weight and bias as in a new head, for example after `to_empty`.

        A weight that was given to the head is left to its owner.
        """
        if not self._shares_weight:
            bound = _initial_bound(self.dim)
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            fill_(self.bias, self._initial_bias(self.sampler).to(self.bias.dtype))

    def _initial_bias(self, sampler: Sampler) -> Tensor:
        """Return the log frequencies of the counts, or of the sampler's, one for each row; 0 if there are none."""
        frequency = self._counts[0].frequency() if self._counts else known_frequency(sampler)
        return torch.zeros(len(self.weight), device="cpu") if frequency is None else frequency.log()

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        return self.weight.shape[0] if self.shard is None else self.shard.num_classes

    @property
    def counts(self) -> tuple[ClassCounts, ...]:
        """The counts that the head was given, if any."""
        return self._counts

    @property
    def is_tied(self) -> bool:
        """True if the class vectors are the rows of an embedding."""
        return len(self._tied) > 0

    @property
    def probe(self) -> ErrorProbe:
        """The error of log Z̃ in training, measured at 1 % of its work after some steps; `probe.error` is in nats."""
        return probe_of(self)

    forward = sampled_loss
    exact_loss = exact_loss
    approximate_log_likelihood = approximate_log_likelihood
    fused_loss, exact_losses, fastest_exact = fused_loss, exact_losses, fastest_exact

    @property
    def tables(self) -> dict[str, Tensor | None]:
        """The class parameters by name."""
        return dict(zip(("weight", "bias"), self.whole_tables(), strict=True))

    @property
    def class_vectors(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias as they are, which may be sharded."""
        return self.weight, self.bias

    def whole_tables(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, gathered from all processes if `fully_shard` has divided them."""
        return gathered(self.weight), None if self.bias is None else gathered(self.bias)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with sparse gradients."""
        return list(self.parameters(recurse=False)) if self.sparse else []

    def scores(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return scores [..., K] of hidden [..., D] for ids [..., K], or for ids [K] that all examples share."""
        self.check_hidden(hidden)
        ids = _check.ids("ids", ids, self.num_classes)
        if self.shard is not None:
            return scores_together(self, hidden, ids)
        rows, bias = self.lookup(ids)
        hidden, rows = self._directions(hidden), self._directions(rows, scaled=False)
        scores = hidden @ rows.T if ids.dim() == 1 else (rows @ hidden.unsqueeze(-1)).squeeze(-1)
        return at_least_float32(scores if bias is None else scores + bias)

    def log_z(self, hidden: Tensor) -> Tensor:
        """Return the exact log Z [...] of hidden [..., D]."""
        self.check_hidden(hidden)
        flat = hidden.reshape(-1, self.dim)
        log_z = exact_log_z(self, flat) if self.shard is None else log_z_together(self, flat)
        return log_z.reshape(hidden.shape[:-1])

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return exact log-probabilities [..., K] for ids [..., K], or for ids [K] that all examples share."""
        self.check_hidden(hidden)
        if self.shard is not None:
            return log_prob_together(self, hidden, _check.ids("ids", ids, self.num_classes))
        return exact_log_prob(self, hidden.reshape(-1, self.dim), ids, hidden.shape[:-1])

    def topk(self, hidden: Tensor, k: int, *, exclude: Tensor | None = None) -> TopK:
        """Return exactly the k most probable classes of hidden [..., D] that are not in exclude [..., E]."""
        self.check_hidden(hidden)
        shape = hidden.shape[:-1]
        if exclude is not None:
            exclude = _check.ids("exclude", exclude, self.num_classes, pads=True)
            exclude = exclude.reshape(-1, exclude.shape[-1])
        flat = hidden.reshape(-1, self.dim)
        best = exact_topk(self, flat, k, exclude) if self.shard is None else topk_together(self, flat, k, exclude)
        return TopK(best.log_prob.reshape(*shape, k), best.ids.reshape(*shape, k))

    def to_linear(self) -> nn.Linear:
        """Return an nn.Linear that shares the parameters, for code that needs all logits.

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
        """Append classes, or remove the last ones, together with the state of the sampler and the optimiser.

        New rows are initialised as in a new head; their bias is the smallest bias.

        Args:
            num_classes: the new C.
            sampler: a sampler of the new number of classes; None: the present one is resized, if it was built from
                ClassCounts (new classes have a count of 0).
            optimizer: an optimiser of the head's parameters, whose state is resized.

        Raises:
            ValueError: the sampler cannot be resized, `sampler` has another number of classes, or the head is sharded.
        """
        _check.integer("num_classes", num_classes, 1)
        if self.shard is not None:
            raise ValueError(f"`head` must be whole to be resized, got one divided among {self.shard.ranks} processes")
        if is_sharded(self.weight):
            raise ValueError("`weight` must be whole to be resized, got one that is sharded: resize before fully_shard")
        # The sampler first: if it cannot be resized, nothing has changed yet.
        if sampler is None:
            self.sampler.resize(num_classes)
        elif sampler.num_classes != num_classes:
            raise ValueError(f"`sampler` must draw from {num_classes} classes, got {sampler.num_classes}")
        old = self.num_classes
        added = max(0, num_classes - old)
        resize_rows(self.weight, _initial_rows(added, self.dim), num_classes)
        if self.bias is not None:
            resize_rows(self.bias, self.bias.data.min().expand(added), num_classes)
        for counts in self._counts:
            # Those of the sampler are resized already.
            if counts.num_classes != num_classes:
                counts = copy.deepcopy(counts)
                counts.resize(num_classes)
                self._counts = (counts,)
        for embedding in self._tied:
            embedding.num_embeddings = num_classes
        # Attached again, now that there are as many class vectors as classes.
        self.use(self.sampler if sampler is None else sampler)
        if optimizer is not None:
            for parameter in self.parameters(recurse=False):
                resize_state(optimizer, parameter, old)

    def use(self, sampler: Sampler) -> None:
        """Draw with this sampler from now on; the head's class vectors are attached to it.

        Raises:
            TypeError: it lacks a member of `samplers.Sampler`.
            ValueError: it has another number of classes, or classes are divided among processes.
        """
        if self.shard is not None:
            raise ValueError("`sampler` must be chosen before the classes are divided among processes, got another one")
        check_life_cycle(sampler)
        if sampler.num_classes != self.num_classes:
            raise ValueError(f"`sampler` must draw from {self.num_classes} classes, got {sampler.num_classes}")
        self.sampler = sampler.to(self.weight.device)
        sampler.attach(self.weight, self.bias)
        score_by(sampler, self._similarity)

    def candidate_scores(self, hidden: Tensor, target: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return scores of the targets [B] and of the candidates [B, ΣK + I], -inf where excluded."""
        if self.shard is not None:
            return scores_of_part(self, self.shard, hidden, target, candidates)
        blocks = candidates.parts(empty=target)
        flat = torch.cat([block.ids.reshape(-1) for block in blocks])
        if self.update == "observed":
            target_rows, target_bias = self.lookup(target)
            with torch.no_grad():
                rows, bias = self.lookup(flat)
            replace = replace_target_rows(flat, target)
            rows = replace(rows, target_rows)
            bias = None if bias is None or target_bias is None else replace(bias, target_bias)
        else:
            # One lookup for all, so that there is one gradient.
            rows, bias = self.lookup(torch.cat([target, flat]))
            sizes = [len(target), len(flat)]
            target_rows, rows = rows.split(sizes)
            target_bias, bias = (None, None) if bias is None else bias.split(sizes)
        target_score = self._pair(hidden, target_rows, target_bias)
        hidden, rows = self._directions(hidden), self._directions(rows, scaled=False)
        sizes = [block.ids.numel() for block in blocks]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        scores = [
            linear_scores(hidden, part, part_bias, block)
            for block, part, part_bias in zip(blocks, rows.split(sizes), biases, strict=True)
        ]
        return target_score, exclude_hits(scores, candidates)

    def score_chunks(self, size: int) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
        """Yield for each run of `size` classes its first id and a function from hidden [B, D] to scores [B, size]."""
        weight, bias = self.whole_tables()
        first = 0
        if self.shard is not None:
            first, weight = self.shard.first, self.shard.averaged(weight)
            bias = None if bias is None else self.shard.averaged(bias)
            if len(weight) == 0:
                return
        # Split, not sliced: the gradient of each slice would be a whole table.
        rows = weight.split(size)
        biases = (None,) * len(rows) if bias is None else bias.split(size)
        for i, (part, part_bias) in enumerate(zip(rows, biases, strict=True)):

            def score(hidden: Tensor, part: Tensor = part, bias: Tensor | None = part_bias) -> Tensor:
                return F.linear(self._directions(hidden), self._directions(part, scaled=False), bias)

            yield first + i * size, score

    def class_gradient(self, hidden: Tensor, ids: Tensor, gamma: Tensor) -> Tensor:
        """Return Σ_b γ[b, u] ∂s(u)/∂w_u for ids [U] and γ [B, U]: [U, D], or [U, D + 1] with biases.

        The ids are those of this process if classes are divided.
        """
        if self.shard is not None:
            ids = ids - self.shard.first
        rows = gathered(self.weight).detach()[ids].requires_grad_()
        with torch.enable_grad():
            scores = self._directions(hidden) @ self._directions(rows, scaled=False).T
            (gradient,) = torch.autograd.grad((scores * gamma).sum(), rows)
        return gradient if self.bias is None else torch.cat([gradient, gamma.sum(0).unsqueeze(1)], 1)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows [N, D] and biases [N] of classes [N]."""
        rows = self._rows(self.weight, ids)
        return rows, None if self.bias is None or self._biases is None else self._biases(self.bias, ids)

    def _directions(self, x: Tensor, *, scaled: bool = True) -> Tensor:
        return directions(x, self._similarity, scaled=scaled)

    @property
    def _similarity(self) -> Similarity:
        return Similarity(self.similarity, self.scale)

    def _pair(self, hidden: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return scores [B] of hidden [B, D], each with one row of [B, D]."""
        hidden = at_least_float32(self._directions(hidden))
        rows = at_least_float32(self._directions(rows, scaled=False))
        score = (hidden * rows).sum(-1)
        return score if bias is None else score + bias

    def check_hidden(self, hidden: Tensor) -> None:
        """Raise unless `hidden` is [..., D], on the device and of the dtype of the head.

        Raises:
            TypeError: it is not a Tensor.
            ValueError: it has another shape, device or, outside autocast, dtype.
        """
        _check.tensor("hidden", hidden)
        if hidden.dim() == 0 or hidden.shape[-1] != self.dim:
            raise ValueError(f"`hidden` must have shape [..., {self.dim}], got {list(hidden.shape)}")
        _check.device("hidden", hidden, self.weight.device)
        if hidden.dtype != self.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise ValueError(
                f"`hidden` must have the head's dtype, {self.weight.dtype}, outside autocast, got {hidden.dtype}"
            )

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        similarity = "" if self.similarity == "dot" else f", similarity='cosine', scale={self.scale:g}"
        return (
            f"dim={self.dim}, num_classes={self.num_classes}, bias={self.bias is not None}{similarity}, "
            f"update={self.update!r}, sparse={self.sparse}, objective={self.objective!r}"
        )


def _initial_bound(dim: int) -> float:
    return 1 / math.sqrt(dim)


def _initial_rows(
    rows: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return rows initialised as nn.Linear does."""
    bound = _initial_bound(dim)
    return torch.empty(rows, dim, device=device, dtype=dtype).uniform_(-bound, bound)
