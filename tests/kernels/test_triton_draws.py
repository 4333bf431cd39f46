"""The loss of a draw by Triton's kernels has the losses and gradients of the eager reference."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from manyclass import ClassHead
from manyclass.candidates import Block, Candidates
from manyclass.forms import DOT, Similarity
from manyclass.kernels.draw import LinearDraw
from manyclass.kernels.eager import eager_loss
from tests import tables

pytest.importorskip("triton")

from manyclass.kernels.triton.closed_form import closed_form_loss
from manyclass.kernels.triton.slots import MAX_COMPARED

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # Triton's interpreter computes by NumPy, which warns about infinities.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
]

C, D = 50, 7
FORMS = {name: objective.form for name, (objective, *_) in tables.OBJECTIVES.items() if objective.form is not None}
# The groups of each block; the last of them is sorted in the case "sorted".
DRAWS = {
    "shared": ((1,), 3, 0),
    "groups": ((3,), 3, 0),
    "each": ((None,), 1, 0),
    "explicit and each": ((1, None), 3, 0),
    "no exclusions": ((1,), 0, 0),
    "many exclusions": ((1, 3), MAX_COMPARED + 4, 0),
    "included": ((1,), 3, 4),
    "sorted": ((1, 3), 3, 4),
    "fewer groups than said": ((4, 1), 3, 2),
    "sorted, many exclusions": ((3,), MAX_COMPARED + 1, 2),
}


def candidates_of(case, target):
    groups, excluded, included = DRAWS[case]
    batch = len(target)
    blocks = []
    for number in groups:
        shape = (min(batch, number or batch), 5 + len(blocks))
        log_kappa = torch.randn(shape, dtype=torch.float64)
        log_kappa[0, 0] = -math.inf
        order = torch.randperm(batch) if case.startswith("sorted") and number == 3 else None
        blocks.append(Block(torch.randint(C, shape), log_kappa, order))
    exclude = torch.cat([target.unsqueeze(1), torch.randint(-1, C, (batch, excluded))], 1)[:, :excluded]
    include = torch.randint(-1, C, (batch, included)) if included else None
    target_log_kappa = torch.randn(batch, dtype=torch.float64)
    return Candidates(tuple(blocks), exclude, lambda: target_log_kappa, C, include)


def draw_of(case, batch, *, bias=True, similarity=DOT, sparse=False, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    target = torch.randint(C, (batch,))
    hidden = torch.randn(batch, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(C, D, dtype=dtype, requires_grad=True)
    biases = torch.randn(C, dtype=dtype, requires_grad=True) if bias else None
    return LinearDraw(hidden, weight, biases, target, candidates_of(case, target), similarity, sparse)


def parameters(draw):
    return [x for x in (draw.hidden, draw.weight, draw.bias) if x is not None]


def dense(gradients):
    return [g.to_dense() if g.is_sparse else g for g in gradients]


@pytest.mark.parametrize("batch", [1, 5, 10])
@pytest.mark.parametrize("case", DRAWS)
@pytest.mark.parametrize("name", FORMS)
def test_losses_and_gradients_are_those_of_the_reference(name, case, batch):
    upstream = torch.randn(batch, dtype=torch.float64)
    for bias, similarity, sparse in itertools.product((True, False), (DOT, Similarity("cosine", 5.0)), (True, False)):
        draw = draw_of(case, batch, bias=bias, similarity=similarity, sparse=sparse)
        loss, _ = closed_form_loss(FORMS[name], draw)
        expected = eager_loss(FORMS[name], draw)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        ours, theirs = (torch.autograd.grad(x, parameters(draw), upstream) for x in (loss, expected))
        assert ours[1].is_sparse == sparse
        torch.testing.assert_close(dense(ours), dense(theirs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", DRAWS)
@pytest.mark.parametrize("name", FORMS)
def test_in_float32_the_error_is_no_larger_than_that_of_the_reference(name, case):
    draw = draw_of(case, 10, dtype=torch.float32)
    wide = LinearDraw(*(x.detach().double().requires_grad_() for x in parameters(draw)), draw.target, draw.candidates)
    truth = eager_loss(FORMS[name], wide)
    truth = [truth, *torch.autograd.grad(truth.sum(), parameters(wide))]
    losses = closed_form_loss(FORMS[name], draw)[0], eager_loss(FORMS[name], draw)
    ours, eager = ([loss, *torch.autograd.grad(loss.sum(), parameters(draw))] for loss in losses)
    for found, allowed, exact in zip(ours, eager, truth, strict=True):
        assert (found - exact).abs().max() <= (allowed - exact).abs().max() + 1e-5


@pytest.mark.parametrize("case", DRAWS)
@pytest.mark.parametrize("name", FORMS)
def test_a_second_derivative_is_that_of_the_reference(name, case):
    draw = draw_of(case, 10)
    found = []
    for loss in (closed_form_loss(FORMS[name], draw)[0], eager_loss(FORMS[name], draw)):
        first = torch.autograd.grad(loss.sum(), parameters(draw), create_graph=True)
        total = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(total, parameters(draw), allow_unused=True, materialize_grads=True)
        found.append(second)
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("ignored", [[3], [0, 4, 9], list(range(10))], ids=["one", "some", "all"])
@pytest.mark.parametrize("case", ["shared", "explicit and each", "many exclusions", "sorted"])
@pytest.mark.parametrize("name", FORMS)
def test_ignored_examples_have_no_loss_and_no_gradient_whatever_their_hidden_vectors(name, case, ignored):
    draw = draw_of(case, 10)
    valid = torch.ones(10, dtype=torch.bool)
    valid[ignored] = False
    expected = torch.where(valid, eager_loss(FORMS[name], draw), 0.0)
    damaged = draw.hidden.detach().clone()
    damaged[~valid] = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 1.0, 1.0, 1.0], dtype=damaged.dtype)
    given = replace(draw, hidden=damaged.requires_grad_(), valid=valid)
    loss, score_gradient = closed_form_loss(FORMS[name], given)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert score_gradient is None or (score_gradient[~valid] == 0).all()
    upstream = torch.randn(10, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(x, parameters(d), upstream) for x, d in ((loss, given), (expected, draw)))
    torch.testing.assert_close(dense(ours), dense(theirs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FORMS)
def test_a_second_derivative_leaves_ignored_examples_out(name):
    draw = draw_of("sorted", 6)
    valid = torch.tensor([True, False, True, True, False, True])
    found = []
    for loss in (
        closed_form_loss(FORMS[name], replace(draw, valid=valid))[0],
        torch.where(valid, eager_loss(FORMS[name], draw), 0.0),
    ):
        first = torch.autograd.grad(loss.sum(), parameters(draw), create_graph=True)
        total = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(total, parameters(draw), allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("columns", [127, 128, 129, 511, 512, 513, 1025])
@pytest.mark.parametrize("name", ["likelihood", "logistic ranking"])
def test_any_number_of_slots_fills_the_tiles_of_a_kernel(name, columns):
    torch.manual_seed(0)
    target = torch.randint(C, (5,))
    block = Block(torch.randint(C, (1, columns)), torch.randn(1, columns, dtype=torch.float64))
    candidates = Candidates((block,), target.unsqueeze(1), lambda: torch.zeros(5, dtype=torch.float64), C)
    hidden, weight = (torch.randn(n, D, dtype=torch.float64, requires_grad=True) for n in (5, C))
    draw = LinearDraw(hidden, weight, None, target, candidates)
    losses = closed_form_loss(FORMS[name], draw)[0], eager_loss(FORMS[name], draw)
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(loss.sum(), [hidden, weight]) for loss in losses)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FORMS)
def test_a_draw_of_empty_slots_has_the_loss_of_the_reference(name):
    draw = draw_of("shared", 4)
    block = draw.candidates.blocks[0]
    empty = Block(block.ids, torch.full_like(block.log_kappa, -math.inf))
    candidates = Candidates((empty,), draw.candidates.excluded, draw.candidates.target_log_kappa, C)
    draw = LinearDraw(draw.hidden, draw.weight, draw.bias, draw.target, candidates)
    loss, _ = closed_form_loss(FORMS[name], draw)
    torch.testing.assert_close(loss, eager_loss(FORMS[name], draw))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), parameters(draw)))


def test_the_gradient_of_the_scores_is_that_of_the_slots():
    draw = draw_of("shared", 6)
    form = FORMS["likelihood"]
    _, gradient = closed_form_loss(form, draw)
    scores = torch.nn.functional.linear(draw.hidden, draw.weight, draw.bias).detach()
    ids = draw.candidates.ids()
    slots = scores.gather(1, ids).masked_fill(draw.candidates.empty(), -math.inf) + draw.candidates.log_kappa()
    own = scores.gather(1, draw.target.unsqueeze(1))
    torch.testing.assert_close(gradient, torch.cat([own, slots], 1).softmax(1)[:, 1:])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", tables.SAMPLERS)
def test_a_head_has_the_same_loss_and_gradients_with_every_sampler(name, sparse):
    found = []
    for impl in ("eager", "triton"):
        torch.manual_seed(0)
        sampler = tables.SAMPLERS[name](1 / torch.arange(1, C + 1), 10, 4)
        head = ClassHead(D, C, sampler=sampler, sparse=sparse, impl=impl)
        hidden, target = torch.randn(12, D, requires_grad=True), torch.randint(C, (12,))
        exclude = torch.randint(-1, C, (12, 2))
        for _ in range(2):
            head(hidden, target, exclude=exclude, generator=torch.Generator().manual_seed(1)).backward()
        found.append(dense([hidden.grad, head.weight.grad, head.bias.grad]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="`impl` must be one of 'auto', 'eager', 'triton', got 'cuda'"):
        ClassHead(D, C, impl="cuda")


@pytest.mark.parametrize("name", FORMS)
def test_under_autocast_to_float16_gradients_stay_finite_and_can_be_differentiated(name):
    """A sum over thousands of slots, times the scale that keeps small probabilities, would overflow."""
    torch.manual_seed(0)
    target, k = torch.randint(C, (3,)), 4096
    block = Block(torch.randint(C, (1, k)), torch.zeros(1, k, dtype=torch.float64))
    candidates = Candidates((block,), target.unsqueeze(1), lambda: torch.zeros(3, dtype=torch.float64), C)
    hidden, weight = torch.full((3, D), 0.3, requires_grad=True), torch.full((C, D), 0.25, requires_grad=True)
    draw = LinearDraw(hidden, weight, None, target, candidates)
    found = []
    with torch.autocast("cpu", torch.float16):
        for loss in (closed_form_loss(FORMS[name], draw)[0], eager_loss(FORMS[name], draw)):
            first = torch.autograd.grad(loss.sum(), [hidden, weight], retain_graph=True)
            second = torch.autograd.grad(loss.sum(), [hidden, weight], create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in second), [hidden, weight], allow_unused=True)
            found.append(first)
    assert all(g.isfinite().all() for g in found[0])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
