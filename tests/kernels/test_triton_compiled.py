"""The loss of a draw in a compiled graph, by Triton's kernels, has the values and gradients of eager code."""

from dataclasses import replace

import pytest
import torch

from manyclass import ClassHead
from manyclass.forms import LogSumExp
from manyclass.kernels import triton
from manyclass.samplers import InBatch, Learned, Systematic, WithExplicit
from tests import tables

pytest.importorskip("triton")

from manyclass.kernels.triton import compiled

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings(
        # Triton's interpreter computes by NumPy, which warns about infinities.
        "ignore:divide by zero:RuntimeWarning",
        "ignore:invalid value:RuntimeWarning",
        "ignore::DeprecationWarning:torch",
        "ignore:Sparse invariant checks:UserWarning",
    ),
]

C, D, B = 60, 7, 6
FORMS = {
    name: objective
    for name, (objective, *_) in tables.OBJECTIVES.items()
    if objective.form is not None and objective.form.target_transform is None and not objective.normalised
}
SAMPLERS = {
    "shared": lambda: Systematic(torch.rand(C) + 0.1, 9),
    "groups": lambda: Systematic(torch.rand(C) + 0.1, 9, group_size=4),
    "each": lambda: WithExplicit(Systematic(torch.rand(C) + 0.1, 9, group_size=1), "batch"),
    "in batch": lambda: InBatch(torch.rand(C) + 0.1, 5),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of the operator in graphs."""
    torch._dynamo.reset()
    # As on a GPU: where values are read, ignored examples are not scored at all, and groups differ.
    monkeypatch.setattr("manyclass._check.reads_values", lambda _: False)
    monkeypatch.setattr(triton, "is_available_in_graphs", lambda table: True)
    found = []
    run = compiled.forward_pass
    monkeypatch.setattr(compiled, "forward_pass", lambda *given: found.append(given) or run(*given))
    return found


def trained(head, run, hidden, target, **options):
    head.zero_grad(set_to_none=True)
    x = hidden.clone().requires_grad_()
    torch.manual_seed(1)
    with torch._inductor.config.patch(fallback_random=True):
        loss = run(x, target, **options)
    loss.backward()
    gradients = [p.grad.to_dense() for p in head.parameters()]
    return [loss.detach(), x.grad, *gradients]


@pytest.mark.parametrize(
    ("name", "sampler", "sparse", "bias"),
    [
        *((name, "shared", False, True) for name in FORMS),
        ("likelihood", "shared", True, True),
        ("likelihood", "shared", True, False),
        *(("likelihood", sampler, False, True) for sampler in SAMPLERS if sampler != "shared"),
    ],
)
def test_a_compiled_head_gives_the_loss_and_gradients_of_eager_code(calls, name, sampler, sparse, bias):
    torch.manual_seed(0)
    make = SAMPLERS[sampler]
    head = ClassHead(D, C, sampler=make(), objective=FORMS[name], sparse=sparse, bias=bias, impl="triton")
    hidden, target = torch.randn(B, D), torch.randint(C, (B,))
    target[2] = -100
    options = {"include": torch.tensor([[1, 2]]).expand(B, 2), "exclude": torch.tensor([[4, -1]]).expand(B, 2)}
    eager = trained(head, head, hidden, target, **options)
    assert not calls
    found = trained(head, torch.compile(head, backend="aot_eager", fullgraph=True), hidden, target, **options)
    assert len(calls) == 1
    for expected, ours in zip(eager, found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_sampler_that_learns_observes_the_compiled_loss():
    torch.manual_seed(0)
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        head = ClassHead(D, C, sampler=Learned(torch.rand(C) + 0.1, 9), impl="triton")
        run = torch.compile(head, backend="aot_eager", fullgraph=True) if compiles else head
        for _ in range(3):
            trained(head, run, torch.randn(B, D), torch.randint(C, (B,)))
        states.append(head.sampler.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_survives_the_way_through_an_operator(name):
    form = FORMS[name].form
    found = compiled._form(*compiled._words(form, C))
    resolved = form if isinstance(form, LogSumExp) else replace(form, margin=form.margin_of(C))
    assert found == resolved


def test_the_operator_is_what_it_says_to_the_compiler(calls):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=SAMPLERS["each"](), impl="triton", objective=FORMS["negative sampling"])
    run = torch.compile(head, backend="aot_eager", fullgraph=True)
    trained(head, run, torch.randn(B, D), torch.randint(C, (B,)))
    form, layout, operands, kappa, scale = calls[0]
    vectors = [x.detach().requires_grad_() for x in (operands.hidden, operands.rows, operands.bias)]
    shapes = [n for part in layout.parts for n in (*part.ids.shape, part.size, int(part.drawn))]
    slots = (operands.ids[B:], layout.log_kappa, kappa, operands.valid, layout.order, layout.excluded, layout.mask)
    options = (shapes, layout.rows, C, *compiled._words(form, C), scale)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(compiled.draw_loss, (*vectors, *slots, *options), test_utils=checks)
