"""The closed form gives the losses and gradients of autograd through the objective."""

import dataclasses
import functools

import pytest
import torch

from manyclass import Block, Candidates, ClassHead
from manyclass.forms import LogSumExp, PairSum, Similarity
from manyclass.heads import _fused
from manyclass.kernels import LinearDraw, closed_form_loss, eager_loss, exact_cross_entropy, has_closed_form
from manyclass.kernels.cpu import build
from manyclass.objectives import Likelihood
from manyclass.samplers import WithExplicit
from tests.tables import OBJECTIVES, SAMPLERS

C, D, B = 60, 7, 12
# Objectives with a log z, or without a form, go through autograd.
CLOSED = [name for name in OBJECTIVES if name != "blackout" and not name.startswith("noise")]

# Every test runs with compiled kernels and with torch's operators.
pytestmark = pytest.mark.usefixtures("kernels")


def make(name="systematic", objective=None, dtype=torch.float64, group_size=None, **options):
    torch.manual_seed(0)
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 20, group_size)
    return ClassHead(D, C, sampler=sampler, objective=objective, dtype=dtype, **options)


def step(head, hidden, target, **options):
    """Return the losses and every gradient, dense."""
    head.zero_grad()
    hidden = hidden.detach().requires_grad_()
    loss = head(hidden, target, reduction="none", generator=torch.Generator().manual_seed(1), **options)
    (loss * torch.arange(1, len(loss) + 1)).sum().backward()
    gradients = [hidden.grad, head.weight.grad, *([] if head.bias is None else [head.bias.grad])]
    return loss.detach(), *(g.to_dense() if g.is_sparse else g for g in gradients)


def by_autograd(monkeypatch, call, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(ClassHead, "fused_loss", lambda *arguments: None)
        return call(*arguments, **options)


def agree(ours, theirs, tolerance=1e-12):
    return all((a - b).abs().max() <= tolerance * (1 + b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def counted(monkeypatch):
    """Count calls of the closed forms: a test that falls back to autograd would test nothing."""
    calls = []
    for call in (closed_form_loss, exact_cross_entropy):
        counting = functools.partial(lambda call, *a, **o: calls.append(1) or call(*a, **o), call)
        monkeypatch.setattr(_fused, call.__name__, counting)
    return calls


def takes_closed_form(objective):
    """Return True if this objective has a closed form: pair sums need compiled kernels."""
    return objective in ("likelihood", "plain importance", "subset softmax") or build.library() is not None


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("objective", CLOSED)
# A sampler that draws for small groups has no closed form.
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("clustered", "automatic")])
def test_losses_and_gradients_are_those_of_the_objective(name, objective, bias, sparse, monkeypatch, counted):
    head = make(name, OBJECTIVES[objective][0], bias=bias, sparse=sparse)
    hidden, target = torch.randn(B, D, dtype=torch.float64), torch.randint(C, (B,))
    exclude = torch.randint(-1, C, (B, 3))
    ours = step(head, hidden, target, exclude=exclude)
    # This sampler includes classes: a pair sum counts the slots of each example, so that it goes through autograd.
    includes = name == "tailored, nearest explicit"
    assert bool(counted) == (isinstance(head.objective.form, LogSumExp) if includes else takes_closed_form(objective))
    assert agree(ours, by_autograd(monkeypatch, step, head, hidden, target, exclude=exclude))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("objective", CLOSED)
@pytest.mark.parametrize("name", ["importance", "learned", "minibatch explicit", "set alone"])
def test_losses_and_gradients_with_included_classes_are_those_of_the_objective(
    name, objective, bias, sparse, monkeypatch, counted
):
    head = make(name, OBJECTIVES[objective][0], bias=bias, sparse=sparse)
    hidden, target = torch.randn(B, D, dtype=torch.float64), torch.randint(C, (B,))
    options = {"include": torch.randint(-1, C, (B, 6)), "exclude": torch.randint(-1, C, (B, 3))}
    ours = step(head, hidden, target, **options)
    # A pair sum counts the slots of each example, so that it goes through autograd.
    assert bool(counted) == isinstance(head.objective.form, LogSumExp)
    assert agree(ours, by_autograd(monkeypatch, step, head, hidden, target, **options))


# Three groups of 17 examples; of 17, 17 and 16; of 18, 18 and 14; and one group whose size would divide nothing.
@pytest.mark.parametrize("batch", [51, 50, 52, 17])
@pytest.mark.parametrize("included", [0, 6])
@pytest.mark.parametrize(("bias", "sparse"), [(False, False), (True, True)])
@pytest.mark.parametrize("objective", CLOSED)
def test_losses_and_gradients_of_groups_are_those_of_the_objective(
    objective, bias, sparse, included, batch, monkeypatch, counted
):
    head = make("learned", OBJECTIVES[objective][0], bias=bias, sparse=sparse, group_size=18)
    hidden, target = torch.randn(batch, D, dtype=torch.float64), torch.randint(C, (batch,))
    options = {"exclude": torch.randint(-1, C, (batch, 3))}
    if included:
        options["include"] = torch.randint(-1, C, (batch, included))
    ours = step(head, hidden, target, **options)
    # A pair sum counts the slots of each example if there are included classes, so that it goes through autograd.
    closed = isinstance(head.objective.form, LogSumExp) if included else takes_closed_form(objective)
    assert bool(counted) == closed
    assert agree(ours, by_autograd(monkeypatch, step, head, hidden, target, **options))


@pytest.mark.parametrize("included", [0, 3])
@pytest.mark.parametrize("form", [LogSumExp(True, True), LogSumExp(False, True), PairSum("relu", 1.0, paired=True)])
def test_second_derivatives_of_groups_are_those_of_the_eager_reference(form, included):
    torch.manual_seed(0)
    batch = 35
    sampler = SAMPLERS["learned"](torch.rand(C) + 0.1, 20, 18)
    target, include = torch.randint(C, (batch,)), torch.randint(-1, C, (batch, included))
    candidates = sampler(target, include=include if included else None, exclude=target.unsqueeze(1))
    assert candidates.blocks[0].ids.shape == (2, 20)
    tables = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in ((batch, D), (C, D), (C,))]
    draw = LinearDraw(*tables, target, candidates)
    if not has_closed_form(form, draw):
        assert not isinstance(form, LogSumExp)
        assert included or build.library() is None
        return
    found = []
    for loss in (closed_form_loss(form, draw)[0], eager_loss(form, draw)):
        gradients = torch.autograd.grad(loss.square().sum(), tables, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append([loss.detach(), *gradients, *torch.autograd.grad(penalty, tables)])
    assert agree(*found)


def test_small_groups_and_other_orders_have_no_closed_form():
    draws = [grouped_draw(batch) for batch in (31, 32)]
    assert [has_closed_form(LogSumExp(True, True), draw) for draw in draws] == [False, True]
    block = draws[1].candidates.blocks[0]
    sorted_block = dataclasses.replace(block, order=torch.randperm(32))
    candidates = dataclasses.replace(draws[1].candidates, blocks=(sorted_block,))
    assert not has_closed_form(LogSumExp(True, True), dataclasses.replace(draws[1], candidates=candidates))


def grouped_draw(batch):
    """Return a draw for two groups."""
    sampler = SAMPLERS["learned"](torch.rand(C) + 0.1, 20, -(-batch // 2))
    target = torch.randint(C, (batch,))
    candidates = sampler(target, exclude=target.unsqueeze(1))
    return LinearDraw(torch.randn(batch, D), torch.randn(C, D), None, target, candidates)


@pytest.mark.parametrize("objective", ["likelihood", "plain importance", "subset softmax"])
def test_an_empty_draw_leaves_the_included_classes(objective, monkeypatch):
    """The first example includes nothing, the second one class, the third all; nothing is drawn but the target."""
    target, include = torch.zeros(3, dtype=torch.int64), torch.tensor([[-1] * 5, [2, *[-1] * 4], [0, 1, 2, 3, 4]])
    sampler = WithExplicit(None, torch.tensor([0]), num_classes=5)
    head = ClassHead(D, 5, sampler=sampler, objective=OBJECTIVES[objective][0], dtype=torch.float64)
    hidden = torch.randn(3, D, dtype=torch.float64)
    for options in ({"include": include}, {"include": include, "exclude": torch.tensor([[0, 2]] * 3)}):
        ours = step(head, hidden, target, **options)
        assert all(part.isfinite().all() for part in ours)
        assert agree(ours, by_autograd(monkeypatch, step, head, hidden, target, **options))


@pytest.mark.parametrize("form", [LogSumExp(True, True), LogSumExp(False, True), LogSumExp(True, False)])
def test_included_classes_pass_gradcheck(form):
    torch.manual_seed(0)
    target = torch.tensor([1, 5, 1])
    sampler = SAMPLERS["importance"](torch.rand(9), 4, None)
    include = torch.tensor([[2, 2, -1], [8, 1, 3], [-1, -1, -1]])
    candidates = sampler(target, include=include, exclude=target.unsqueeze(1))
    weight, bias = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    tables = [x.requires_grad_() for x in (torch.randn(3, 2, dtype=torch.float64), weight, bias)]
    for kernel in (lambda *draw: closed_form_loss(*draw)[0], eager_loss):

        def loss(hidden, weight, bias, kernel=kernel):
            return kernel(form, LinearDraw(hidden, weight, bias, target, candidates))

        assert torch.autograd.gradcheck(loss, tables, check_undefined_grad=False)
        assert torch.autograd.gradgradcheck(loss, tables, check_undefined_grad=False)


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (3, 64), (65, 17), (256, 1000)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("objective", "included"), [*((name, 0) for name in CLOSED), ("likelihood", 7)])
def test_in_float32_the_error_is_no_larger_than_autograds(objective, shape, scale, included, monkeypatch, counted):
    torch.manual_seed(0)
    batch, k = shape
    num_classes = k + 50
    sampler = SAMPLERS["importance"](torch.rand(num_classes) + 0.1, k, None)
    head = ClassHead(D, num_classes, sampler=sampler, objective=OBJECTIVES[objective][0])
    hidden, target = torch.randn(batch, D) * scale, torch.randint(num_classes, (batch,))
    options = {"include": torch.randint(-1, num_classes, (batch, included))} if included else {}
    ours = step(head, hidden, target, **options)
    eager = by_autograd(monkeypatch, step, head, hidden, target, **options)
    assert bool(counted) == takes_closed_form(objective)
    exact = by_autograd(monkeypatch, step, head.double(), hidden.double(), target, **options)
    for a, b, truth in zip(ours, eager, exact, strict=True):
        allowed = (b - truth).abs().max() + 1e-5 * (1 + truth.abs().max())
        assert (a - truth).abs().max() <= allowed


@pytest.mark.parametrize("options", [{"ignore_index": 3}, {"weight": torch.rand(B, dtype=torch.float64)}, {}])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_weights_and_ignored_examples(options, reduction, monkeypatch):
    head, target = make(), torch.randint(C, (B,)).index_fill(0, torch.tensor([2, 5]), 3)
    hidden = torch.randn(D, B, dtype=torch.float64).T  # not contiguous

    def run():
        head.zero_grad()
        loss = head(hidden, target, reduction=reduction, generator=torch.Generator().manual_seed(2), **options)
        loss.backward()
        return loss.detach(), head.weight.grad, head.bias.grad

    assert agree(run(), by_autograd(monkeypatch, run))


@pytest.mark.parametrize("objective", CLOSED)
def test_nan_is_never_hidden(objective):
    head = make(objective=OBJECTIVES[objective][0])
    hidden = torch.zeros(B, D, dtype=torch.float64)
    hidden[3, 2] = torch.nan
    with pytest.raises(ValueError, match="`hidden` must hold no NaN, got one at position"):
        head(hidden, torch.arange(B))


def test_an_empty_draw_has_the_loss_of_the_objective(monkeypatch):
    """A draw of one class that every example excludes is empty."""
    target = torch.zeros(3, dtype=torch.int64)
    for objective, *_ in (OBJECTIVES[name] for name in CLOSED):
        sampler = WithExplicit(None, torch.tensor([0]), num_classes=5)
        head = ClassHead(D, 5, sampler=sampler, objective=objective, dtype=torch.float64)
        hidden = torch.randn(3, D, dtype=torch.float64)
        assert agree(step(head, hidden, target), by_autograd(monkeypatch, step, head, hidden, target))


def test_targets_need_not_be_contiguous(monkeypatch):
    head, hidden = make(), torch.randn(B, D, dtype=torch.float64)
    target = torch.randint(C, (B, 3))[:, 1]
    assert not target.is_contiguous()
    assert agree(step(head, hidden, target), by_autograd(monkeypatch, step, head, hidden, target))


def test_function_transforms_go_through_autograd(monkeypatch):
    head, target = make(), torch.randint(C, (B,))
    hidden = torch.randn(B, D, dtype=torch.float64)

    def loss(hidden):
        return head(hidden, target, generator=torch.Generator().manual_seed(1))

    ours = torch.func.grad(loss)(hidden)
    assert agree([ours], [by_autograd(monkeypatch, torch.func.grad(loss), hidden)])
    assert agree([ours], torch.autograd.grad(loss(hidden.requires_grad_()), hidden))


def test_frozen_parts_get_no_gradient():
    head = make(sparse=True)
    head.weight.requires_grad_(False)
    head(torch.randn(B, D, dtype=torch.float64), torch.randint(C, (B,))).backward()
    assert head.weight.grad is None
    assert head.bias.grad is not None
    head.bias.requires_grad_(False)
    hidden = torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    head(hidden, torch.randint(C, (B,))).backward()
    assert hidden.grad is not None


def test_a_second_backward_gives_the_same_gradients():
    head = make()
    loss = head(torch.randn(B, D, dtype=torch.float64), torch.randint(C, (B,)))
    loss.backward(retain_graph=True)
    first = head.weight.grad.clone()
    head.zero_grad()
    loss.backward()
    assert torch.equal(head.weight.grad, first)


def test_gradients_can_be_differentiated_again(monkeypatch):
    head, target = make(), torch.randint(C, (B,))
    hidden = torch.randn(D, B, dtype=torch.float64).T.requires_grad_()

    def penalty():
        head.zero_grad()
        loss = head(hidden, target, generator=torch.Generator().manual_seed(2))
        gradient, of_weight = torch.autograd.grad(loss, (hidden, head.weight), create_graph=True)
        penalty = gradient.square().sum() + of_weight.square().sum()
        return *torch.autograd.grad(penalty, (hidden, head.weight, head.bias)), penalty.detach()

    assert agree(penalty(), by_autograd(monkeypatch, penalty))


def test_an_excluded_class_of_large_score_does_not_underflow_the_others(monkeypatch):
    head = make("exhaustive", dtype=torch.float32)
    with torch.no_grad():
        head.bias[5] = 500.0
    hidden, target = torch.randn(B, D), torch.randint(6, C, (B,))
    exclude = torch.full((B, 1), 5)
    ours = step(head, hidden, target, exclude=exclude)
    assert agree(ours, by_autograd(monkeypatch, step, head, hidden, target, exclude=exclude), 1e-5)
    assert 1 < ours[0].mean() < 10


def test_an_infinite_score_in_an_empty_slot_does_not_count():
    target = torch.tensor([0])
    block = Block(torch.tensor([[1, 2]]), torch.tensor([[0.0, -torch.inf]], dtype=torch.float64))
    candidates = Candidates((block,), target.unsqueeze(1), None, 3)
    weight, bias = torch.zeros(3, D), torch.tensor([0.0, 0.0, torch.inf])
    form, draw = LogSumExp(target=True, kappa=True), LinearDraw(torch.zeros(1, D), weight, bias, target, candidates)
    loss, _ = closed_form_loss(form, draw)
    assert loss.exp().item() == pytest.approx(2)


def linear_draw(similarity="dot", sparse=False):
    """Return a draw of 20 classes for B targets, and the head it was drawn with."""
    head = make(similarity=similarity, sparse=sparse)
    hidden, target = torch.randn(B, D, dtype=torch.float64, requires_grad=True), torch.randint(C, (B,))
    candidates = head.sampler(target, exclude=target.unsqueeze(1), generator=torch.Generator().manual_seed(1))
    measure = Similarity(similarity, head.scale)
    return LinearDraw(hidden, head.weight, head.bias, target, candidates, measure, sparse), head


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_eager_reference_is_the_loss_of_the_head(similarity, sparse):
    draw, head = linear_draw(similarity, sparse)
    losses = eager_loss(head.objective.form, draw)
    expected = head.objective(*head.candidate_scores(draw.hidden, draw.target, draw.candidates), draw.candidates)
    assert torch.equal(losses, expected)
    ours, theirs = (torch.autograd.grad(x.sum(), (draw.hidden, draw.weight, draw.bias)) for x in (losses, expected))
    assert all(
        a.is_sparse == b.is_sparse == (sparse and i > 0) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    )
    assert agree([g.to_dense() for g in ours], [g.to_dense() for g in theirs])


@pytest.mark.parametrize("form", [LogSumExp(True, True), PairSum("relu", 1.0, paired=True)])
def test_only_dot_products_and_untransformed_targets_have_a_closed_form(form):
    draw, _ = linear_draw()
    assert has_closed_form(form, draw) == (isinstance(form, LogSumExp) or build.library() is not None)
    assert not has_closed_form(dataclasses.replace(form, target_transform=lambda score: score - 0.5), draw)
    assert not has_closed_form(form, dataclasses.replace(draw, similarity=Similarity("cosine", 16.0)))


def test_a_cosine_and_a_margin_go_through_autograd(counted):
    hidden, target = torch.randn(B, D, dtype=torch.float64), torch.randint(C, (B,))
    step(make(similarity="cosine"), hidden, target)
    objective = Likelihood()
    objective.form = LogSumExp(True, True, target_transform=lambda score: score - 0.5)
    margin, *_ = step(make(objective=objective), hidden, target)
    assert not counted
    plain, *_ = step(make(), hidden, target)
    assert counted
    assert (margin > plain).all()


def test_the_gradient_of_the_scores_is_that_of_the_objective():
    draw, head = linear_draw()
    target_score, scores = head.candidate_scores(draw.hidden, draw.target, draw.candidates)
    (expected,) = torch.autograd.grad(head.objective(target_score, scores, draw.candidates).sum(), scores)
    loss, score_gradient = closed_form_loss(head.objective.form, draw)
    assert agree([score_gradient], [expected])
    assert loss.requires_grad
    assert not score_gradient.requires_grad
    score_gradient.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
