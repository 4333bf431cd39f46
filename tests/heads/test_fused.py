"""Heads take the exact loss from a kernel where they can, and its gradients are not copied."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyclass import ClassHead
from manyclass.forms import LogSumExp
from manyclass.heads import _fused
from manyclass.kernels import exact_cross_entropy
from manyclass.objectives import Likelihood, PlainImportance, SubsetSoftmax
from manyclass.optim import RowAdagrad, RowAdam, RowSGD
from manyclass.samplers import Exhaustive
from tests.kernels.operands import B, C, D, distance

pytestmark = pytest.mark.usefixtures("kernels", "runs_of_256_classes")


@pytest.fixture
def taken(monkeypatch):
    """Note the ways that heads ask for."""
    ways = []

    def note(*arguments, way, **options):
        ways.append(way)
        return exact_cross_entropy(*arguments, way=way, **options)

    monkeypatch.setattr(_fused, "exact_cross_entropy", note)
    return ways


def make_head(**options):
    torch.manual_seed(1)
    options = {"sampler": Exhaustive(C), "dtype": torch.float64, **options}
    head = ClassHead(D, C, counts=torch.rand(C) + 0.1, **options)
    return head, torch.randn(B, D, dtype=torch.float64, requires_grad=True), torch.randint(C, (B,))


def dense(parameter):
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


@pytest.mark.parametrize("objective", [Likelihood(), PlainImportance(), SubsetSoftmax()])
@pytest.mark.parametrize(
    "options",
    [{}, {"similarity": "cosine"}, {"bias": False}, {"sparse": True}, {"sparse": True, "similarity": "cosine"}],
)
def test_a_head_takes_the_exact_loss(options, objective, taken, monkeypatch):
    head, hidden, target = make_head(objective=objective, **options)
    exclude = torch.randint(-1, C, (B, 3))
    examples = {"exclude": exclude, "weight": torch.rand(B), "ignore_index": int(target[2])}

    def step():
        head.zero_grad()
        hidden.grad = None
        loss = head(hidden, target, **examples)
        loss.backward()
        return [loss.detach(), hidden.grad, *map(dense, head.parameters(recurse=False))]

    ours = step()
    assert taken == [None]
    assert all(p.grad.is_sparse == head.sparse for p in head.parameters(recurse=False))
    with monkeypatch.context() as patch:
        patch.setattr(ClassHead, "fused_loss", lambda *arguments: None)
        assert distance(ours, step()) < 1e-12
    assert distance([head.exact_loss(hidden, target, **examples)], ours[:1]) < 1e-12


class Margin:
    form = LogSumExp(target=True, kappa=True, target_transform=lambda score: score - 0.2)
    keeps_hits = normalised = False

    def __call__(self, target_score, scores, candidates):
        return self.form.loss(target_score, scores, candidates)


class CountsTargetsTwice(Margin):
    form = LogSumExp(target=True, kappa=True)
    keeps_hits = True


@pytest.mark.parametrize(
    "options", [{"update": "observed"}, {"objective": Margin()}, {"objective": CountsTargetsTwice()}]
)
def test_other_losses_and_updates_are_scored_as_before(options, taken, monkeypatch):
    head, hidden, target = make_head(**options)
    loss = head(hidden, target)
    assert taken == []
    monkeypatch.setattr(ClassHead, "fused_loss", lambda *arguments: None)
    assert distance([loss], [head(hidden, target)]) < 1e-13


def test_a_way_is_taken_where_it_supports_the_batch(taken):
    head, hidden, target = make_head(sampler=Exhaustive(C, way="chunked"))
    head(hidden, target)
    head.use(Exhaustive(C, way="cut"))
    head(hidden, target)
    assert taken == ["chunked", None]


def test_a_nan_is_named():
    head, hidden, target = make_head()
    with torch.no_grad():
        head.weight[7, 1] = math.nan
    for call in (head, head.exact_loss):
        with pytest.raises(ValueError, match="NaN"):
            call(hidden, target)


def test_the_probabilities_of_an_exact_step_are_shown_to_a_sampler_that_learns(monkeypatch):
    head, hidden, target = make_head()
    seen = []
    monkeypatch.setattr(Exhaustive, "learns", True)
    monkeypatch.setattr(Exhaustive, "observe", lambda self, outcome: seen.append(outcome.probability()))
    head(hidden, target)
    p = head.log_prob(hidden, torch.arange(C)).exp().detach().scatter(1, target.unsqueeze(1), 0.0)
    assert distance(seen, [p.square().mean(0).sqrt()]) < 1e-12


@pytest.mark.parametrize("make", [RowAdagrad, RowAdam, lambda p: RowSGD(p, 0.1, momentum=0.5)])
def test_row_optimisers_take_a_gradient_of_all_rows_without_gathering(make, kernels, monkeypatch):
    found = []
    for sparse in (True, False):
        head, hidden, target = make_head(sparse=sparse)
        optimizer = make(head.parameters())
        for _ in range(3):
            head(hidden, target).backward()
            assert head.weight.grad.is_sparse == sparse
            with monkeypatch.context() as patch:
                if sparse:
                    assert head.weight.grad.is_coalesced()
                if sparse and kernels == "eager":
                    patch.setattr(torch.Tensor, "coalesce", None)
                    patch.setattr(torch.Tensor, "index_select", None)
                optimizer.step()
            optimizer.zero_grad()
        found.append([head.weight.detach(), head.bias.detach()])
    assert distance(*found) < 1e-12


class Tables(TorchDispatchMode):
    """The places in memory, other than that of a table, where operators put a dense tensor of its size or more."""

    def __init__(self, table):
        super().__init__()
        self.table, self.places = table, set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and not found.is_sparse and found.numel() >= self.table.numel():
            self.places |= {found.data_ptr()} - {self.table.data_ptr()}
        return found


def test_a_step_copies_no_table():
    """Of all that a step makes, only the gradient of the table has its size."""
    head = ClassHead(32, C, sampler=Exhaustive(C))
    hidden = torch.randn(4, 32, requires_grad=True)
    with Tables(head.weight) as made:
        head(hidden, torch.arange(4)).backward()
    assert made.places == {head.weight.grad.data_ptr()}


def test_a_sparse_gradient_is_not_copied(monkeypatch):
    made, make = set(), torch.sparse_coo_tensor
    monkeypatch.setattr(torch, "sparse_coo_tensor", lambda i, v, *a, **o: made.add(v.data_ptr()) or make(i, v, *a, **o))
    head, hidden, target = make_head(sparse=True)
    head(hidden, target).backward()
    assert {parameter.grad._values().data_ptr() for parameter in head.parameters(recurse=False)} == made


def test_sparse_gradients_of_several_steps_add_up():
    head, hidden, target = make_head(sparse=True)
    loss = head(hidden, target)
    loss.backward(retain_graph=True)
    once = head.weight.grad.to_dense().clone()
    loss.backward()
    head(hidden, target).backward()
    assert head.weight.grad.is_coalesced()
    assert head.weight.grad._nnz() == C
    assert distance([head.weight.grad.to_dense()], [3 * once]) < 1e-14


@pytest.mark.parametrize("sparse", [False, True])
def test_a_compiled_step_gathers_rows_only_for_sparse_gradients(sparse):
    head, hidden, target = make_head(sparse=sparse)
    graphs = []
    compiled = torch.compile(head, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    found = []
    for call in (head, compiled):
        head.zero_grad()
        hidden.grad = None
        loss = call(hidden, target)
        loss.backward()
        found.append([loss, hidden.grad, dense(head.weight), dense(head.bias)])
    assert distance(*found) < 1e-12
    code = graphs[0].code
    assert ("gather_rows" in code, "cross_entropy" in code) == (sparse, not sparse)
