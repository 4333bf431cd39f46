"""Hierarchical softmax: a binary tree of decisions instead of a normaliser."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check, _ranks
from manyclass._context import isolated
from manyclass._plain_state import load_state, move_state, save_state
from manyclass.counts import ClassCounts
from manyclass.defaults import IGNORE_INDEX
from manyclass.heads._huffman import canonical, check_lengths, code_lengths
from manyclass.heads._rows import RowLookup, gathered
from manyclass.heads.exact import TopK
from manyclass.heads.examples import flatten_examples
from manyclass.kernels import at_least_float32


class HierarchicalHead(nn.Module):
    """A tree with p(class) = Π σ(± (w_n · hidden + b_n)) over the inner nodes n on its path (Morin & Bengio 2005).

    The tree has C - 1 inner nodes and probabilities that sum to 1; a class costs the length of its path. It is
    a different model from the softmax, not an approximation of it.

    Args:
        dim: D, the length of `hidden`.
        num_classes: C, at least 2.
        counts: the count of each class: the tree is Huffman's, frequent classes near its root. None: balanced.
        sparse: whether the gradients of weight and bias are row-sparse.
        device, dtype: device and dtype of the parameters.

    Example:
        >>> head = HierarchicalHead(4, 5, counts=torch.tensor([8, 4, 2, 1, 1]))
        >>> hidden = torch.randn(3, 4)
        >>> torch.allclose(head.log_prob(hidden, torch.arange(5)).exp().sum(1), torch.ones(3))
        True
    """

    saved = ("lengths",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        counts: ClassCounts | Tensor | None = None,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = _check.integer("dim", dim, 1)
        self.num_classes = _check.integer("num_classes", num_classes, 2)
        counts = None if counts is None else ClassCounts.of(counts, num_classes)
        self.weight = nn.Parameter(torch.empty(num_classes - 1, dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes - 1, device=device, dtype=dtype))
        self.reset_parameters()
        with isolated():
            self._use(code_lengths(torch.ones(num_classes) if counts is None else counts.weights()))
        if not self.weight.is_meta:
            self.move(self.weight.device)
        self._rows = RowLookup(self, "weight", sparse=sparse)
        self._biases = RowLookup(self, "bias", sparse=sparse)

    def reset_parameters(self) -> None:
        """Initialise weight and bias as in a new head, for example after `to_empty`."""
        bound = 1 / math.sqrt(self.dim)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def _use(self, lengths: Tensor) -> None:
        """Derive the code and its tables from the lengths of all codes, int64 [C]."""
        self.lengths = lengths
        self._code = code = canonical(lengths.cpu())
        self._rank = code.rank.to(lengths.device)
        levels = (code.first, code.before, code.leaves, code.inner)
        self._levels = torch.tensor(levels, device=lengths.device)

    device = property(lambda self: self.lengths.device)

    def move(self, device: torch.device) -> None:
        """Move the tables of the tree to a device."""
        self.lengths, self._rank, self._levels = (x.to(device) for x in (self.lengths, self._rank, self._levels))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Rebuild the tree from saved lengths; raise ValueError unless they are those of a tree of C classes."""
        with isolated():
            self._use(check_lengths("lengths", state["lengths"], self.num_classes).to(self.device))

    def forward(
        self,
        hidden: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        include: Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the exact -log p(target); arguments are those of `ClassHead`.

        As no class is sampled, `include` is checked and changes nothing: batches may carry it for other heads.
        """
        _ranks.check_prepared(self)
        examples = flatten_examples(
            hidden,
            target,
            self.num_classes,
            weight=weight,
            include=include,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        loss = -self.log_prob(examples.hidden, examples.target.unsqueeze(1)).squeeze(1)
        _check.finite_loss(loss, hidden=examples.hidden, weight=self.weight, bias=self.bias)
        return examples.reduce(examples.without_ignored(loss), reduction)

    def log_prob(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return log-probabilities [..., K] of hidden [..., D] for ids [..., K], or for ids [K] that all share."""
        self._check_hidden(hidden)
        ids = _check.ids("ids", ids, self.num_classes)
        nodes, right, on_path = self._paths(ids)
        rows, bias = self._rows(self.weight, nodes), self._biases(self.bias, nodes)
        scores = torch.einsum("...d,...kld->...kl", hidden, rows.expand(*hidden.shape[:-1], *rows.shape[-3:]))
        # log σ(-s) to the left, log σ(s) to the right.
        steps = F.logsigmoid(torch.where(right, 1.0, -1.0) * at_least_float32(scores + bias))
        return torch.where(on_path, steps, 0.0).sum(-1)

    def _paths(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return inner nodes for each class, masks of right turns and of nodes on its path: [..., L] each.

        The first l bits of the code give the node at depth l; the next bit is 1 for right.
        """
        length, rank = self.lengths[ids], self._rank[ids]
        first, before, leaves, inner = self._levels
        bits = first[length] + rank - before[length]
        depth = torch.arange(len(first) - 1, device=ids.device)
        below = length.unsqueeze(-1) - depth
        on_path = below > 0
        prefix = bits.unsqueeze(-1) >> below.clamp(min=0)
        nodes = (inner[:-1] + prefix - first[:-1] - leaves[:-1]).masked_fill(~on_path, 0)
        right = (bits.unsqueeze(-1) >> (below - 1).clamp(min=0)) & 1 == 1
        return nodes, right, on_path

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int) -> TopK:
        """Return exactly the k most probable classes of hidden [..., D], in one sweep down the tree."""
        self._check_hidden(hidden)
        _check.integer("k", k, 1, self.num_classes)
        code = self._code
        scores = at_least_float32(F.linear(hidden, gathered(self.weight), gathered(self.bias)))
        level = scores.new_zeros(*hidden.shape[:-1], 1)
        by_rank = []
        for depth, start in enumerate(code.inner[:-1]):
            here = scores[..., start : code.inner[depth + 1]]
            left, right = level + F.logsigmoid(-here), level + F.logsigmoid(here)
            level = torch.stack([left, right], -1).flatten(-2)
            by_rank.append(level[..., : code.leaves[depth + 1]])
            level = level[..., code.leaves[depth + 1] :]
        best, rank = torch.cat(by_rank, -1).topk(k, -1)
        return TopK(best, self._rank.argsort()[rank])

    def _check_hidden(self, hidden: Tensor) -> None:
        _check.tensor("hidden", hidden)
        if hidden.dim() == 0 or hidden.shape[-1] != self.dim:
            raise ValueError(f"`hidden` must have shape [..., {self.dim}], got {list(hidden.shape)}")

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with sparse gradients."""
        return [self.weight, self.bias] if self._rows.sparse else []

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"dim={self.dim}, num_classes={self.num_classes}, depth={len(self._code.leaves) - 1}"
