"""The losses of a head with class vectors from kernels, over a draw and over all classes."""

from typing import Protocol

import torch
from torch import Tensor, nn

from manyclass._context import is_transformed
from manyclass.candidates import Candidates
from manyclass.forms import Form, Similarity, is_cross_entropy
from manyclass.heads._probe import ProbedHead, exhaustive_seconds
from manyclass.heads._rows import is_sharded, with_sparse_gradient
from manyclass.heads.exact import exact_scores
from manyclass.heads.examples import Examples
from manyclass.kernels import (
    LinearDraw,
    available_ways,
    closed_form_loss,
    directions,
    exact_cross_entropy,
    fastest_way,
    has_closed_form,
    runs_triton,
    triton,
)


class LinearHead(ProbedHead, Protocol):
    """A head with a table of class vectors."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    sparse: bool
    update: str
    impl: str

    @property
    def _similarity(self) -> Similarity: ...

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows and biases of classes."""
        ...

    def whole_tables(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, gathered if they are sharded."""
        ...


def fused_loss(self: LinearHead, examples: Examples, candidates: Candidates) -> tuple[Tensor, Tensor | None] | None:
    """Return losses [B] and, if known, ∂loss/∂s [B, K] from a kernel; None if there is none for this draw.

    The losses of ignored examples are 0.
    """
    form = _fusible_form(self)
    if form is None:
        return None
    if self.shard is not None:
        # Sums over the classes of several processes are no kernel's. All classes are scored chunk by chunk.
        if not (candidates.is_exhaustive and is_cross_entropy(form, keeps_hits=self.objective.keeps_hits)):
            return None
        target_score, log_z = exact_scores(self, examples.hidden, examples.target.unsqueeze(1), examples.exclude)
        return examples.without_ignored(log_z - target_score.squeeze(1)), None
    if candidates.is_exhaustive and is_cross_entropy(form, keeps_hits=self.objective.keeps_hits):
        # torch.compile cannot pass a sparse gradient through a graph.
        sparse = self.sparse and not is_sharded(self.weight)
        if not (sparse and torch.compiler.is_compiling()):
            way = "eager" if self.impl == "eager" else candidates.way
            return examples.without_ignored(_cross_entropy(self, examples, way, sparse=sparse)), None
    if self.impl == "eager":
        return None
    # Kernels read the memory of tensors, which a graph that is being compiled does not have.
    if torch.compiler.is_compiling():
        return _in_graph(self, form, examples, candidates) if self.impl == "triton" else None
    draw = LinearDraw(
        examples.hidden,
        self.weight,
        self.bias,
        examples.target,
        candidates,
        self._similarity,
        self.sparse,
        examples.valid,
    )
    # Subclasses of tensors, such as sharded ones, go through torch's operators.
    if not is_sharded(self.weight) and runs_triton(draw.hidden, draw.weight, impl=self.impl):
        from manyclass.kernels.triton import closed_form

        return closed_form.closed_form_loss(form, draw)
    if self.impl == "triton" or not has_closed_form(form, draw):
        return None
    loss, score_gradient = closed_form_loss(form, draw)
    return examples.without_ignored(loss), score_gradient


def _in_graph(
    self: LinearHead, form: Form, examples: Examples, candidates: Candidates
) -> tuple[Tensor, Tensor | None] | None:
    """Return losses [B] and, if known, ∂loss/∂s [B, K] by an operator of a graph that is being compiled."""
    if form.target_transform is not None or is_sharded(self.weight) or not triton.is_available_in_graphs(self.weight):
        return None
    from manyclass.kernels.triton.compiled import compiled_loss
    from manyclass.kernels.triton.slots import Layout

    layout = Layout.of(candidates, examples.target)
    if layout is None:
        return None
    rows, bias = self.lookup(torch.cat([examples.target, *(part.ids.reshape(-1) for part in layout.parts)]))
    hidden, rows = _operands(self, examples.hidden, rows)
    return compiled_loss(form, hidden, rows, bias, layout, candidates, examples.valid)


def exact_losses(self: LinearHead, examples: Examples) -> Tensor | None:
    """Return the losses [B] over all classes from a kernel; None in traced code, for which there is none."""
    return None if is_transformed() or self.shard is not None else _cross_entropy(self, examples, None, sparse=False)


def fastest_exact(self: LinearHead, examples: Examples) -> tuple[str | None, float]:
    """Return the fastest way to the exact loss of the examples, and the seconds of the loss and its gradients."""
    form = _fusible_form(self)
    if form is None or not is_cross_entropy(form, keeps_hits=self.objective.keeps_hits):
        return None, exhaustive_seconds(self, examples)
    hidden, weight = _operands(self, examples.hidden, self.weight)
    return fastest_way(hidden, weight, target=examples.target, bias=self.bias, exclude=examples.exclude)


def _fusible_form(head: LinearHead) -> Form | None:
    """Return the form of the objective if kernels can compute its loss and gradients; else None."""
    # The log z of a normalised objective, fixed or learned, is not in its form.
    return None if head.objective.normalised or head.update != "scored" else head.objective.form


def _cross_entropy(head: LinearHead, examples: Examples, way: str | None, *, sparse: bool) -> Tensor:
    weight, bias = head.whole_tables()
    if sparse:
        weight, bias = with_sparse_gradient(weight), None if bias is None else with_sparse_gradient(bias)
    hidden, weight = _operands(head, examples.hidden, weight)
    if way not in available_ways(hidden, weight, exclude=examples.exclude):
        way = None
    return exact_cross_entropy(hidden, weight, bias=bias, target=examples.target, exclude=examples.exclude, way=way)


def _operands(head: LinearHead, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two factors of the scores."""
    return directions(hidden, head._similarity), directions(weight, head._similarity, scaled=False)
