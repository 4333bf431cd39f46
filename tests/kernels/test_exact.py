"""Every way to the exact loss gives the losses and gradients of F.cross_entropy."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from manyclass.kernels import available_ways, default_way, exact, exact_cross_entropy
from manyclass.samplers import Exhaustive
from tests.kernels.operands import OWN, B, C, D, distance, gradients, operands, parameters, reference

WAYS = [
    *OWN,
    pytest.param(
        "linear_cross_entropy",
        marks=pytest.mark.skipif(
            not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
        ),
    ),
]

pytestmark = [
    pytest.mark.usefixtures("all_kernels", "runs_of_256_classes"),
    # Triton's interpreter computes by NumPy, which warns about the logarithm of an empty sum.
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", OWN)
def test_a_run_of_classes_of_bias_minus_infinity_adds_nothing(way, dtype):
    given = operands(dtype)
    with torch.no_grad():
        given["bias"][:400] = -math.inf
    given["target"] = given["target"] % 300 + 400
    loss = exact_cross_entropy(**given, way=way)
    rest = {name: given[name].detach()[400:] for name in ("weight", "bias")}
    expected = exact_cross_entropy(given["hidden"], **rest, target=given["target"] - 400, way="eager")
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    assert all(given[name].grad.isfinite().all() for name in ("hidden", "weight", "bias"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("excluded", [0, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_way_gives_the_losses_and_gradients_of_cross_entropy(way, excluded, bias):
    given = operands(bias=bias, excluded=excluded)
    if way not in available_ways(given["hidden"], given["weight"], exclude=given["exclude"]):
        assert way == "linear_cross_entropy"
        assert excluded
        return
    loss, expected = exact_cross_entropy(**given, way=way), reference(given)
    assert distance([loss], [expected]) < 1e-13
    assert distance(gradients(loss, given), gradients(expected, given)) < 1e-13


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("way", WAYS)
def test_in_float32_the_error_is_no_larger_than_that_of_the_reference(way, scale):
    """At scale 60 scores differ by hundreds, so whole runs of classes have no probability in float32."""
    given = operands(torch.float32, scale=scale)
    wide = {
        name: x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x
        for name, x in given.items()
    }
    truth = reference(wide)
    truth = [truth, *gradients(truth, wide)]
    loss, eager = exact_cross_entropy(**given, way=way), reference(given)
    found, allowed = ([x, *gradients(x, given)] for x in (loss, eager))
    for ours, theirs, exact_value in zip(found, allowed, truth, strict=True):
        bound = (theirs - exact_value).abs().max() + 1e-5 * (1 + exact_value.abs().max())
        assert (ours - exact_value).abs().max() <= bound


@pytest.mark.parametrize("way", OWN)
def test_a_target_far_below_the_other_classes_has_the_gradient_of_the_reference(way):
    """exp(log Z - score) of such a target overflows in float32."""
    given = operands(torch.float32)
    with torch.no_grad():
        given["bias"][256:] -= 300
    given["target"] = torch.full((B,), 600)
    loss = exact_cross_entropy(**given, way=way)
    assert loss.min() > 200
    assert distance(gradients(loss, given), gradients(reference(given), given)) < 1e-5


@pytest.mark.parametrize("way", OWN)
def test_an_example_may_exclude_all_but_its_target(way):
    given = operands(torch.float32)
    others = torch.arange(C).expand(B, C)
    given["exclude"] = others.masked_fill(others == given["target"].unsqueeze(1), -1)
    loss = exact_cross_entropy(**given, way=way)
    assert (loss == 0).all()
    assert all(gradient.abs().max() < 1e-6 for gradient in gradients(loss, given))


@pytest.mark.parametrize("way", OWN)
def test_a_loss_is_never_below_0(way):
    """A target whose probability is 1 up to rounding has the loss 0."""
    given = operands(torch.float32, scale=100.0)
    with torch.no_grad():
        given["target"] = F.linear(given["hidden"], given["weight"], given["bias"]).argmax(1)
        loss = exact_cross_entropy(**given, way=way)
    assert loss.min() >= 0
    assert (loss == 0).any()


@pytest.mark.parametrize("way", ["closed_form", "chunked"])
def test_a_second_derivative_is_that_of_cross_entropy(way):
    given = operands(excluded=2)
    found = []
    for loss in (exact_cross_entropy(**given, way=way), reference(given)):
        first = gradients(loss, given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), parameters(given)))
    assert distance(*found) < 1e-12


@pytest.mark.parametrize("way", ["closed_form", "chunked"])
def test_a_backward_pass_can_be_repeated(way):
    given = operands()
    loss = exact_cross_entropy(**given, way=way)
    first = gradients(loss, given, retain_graph=True)
    assert distance(gradients(loss, given), first) == 0


@pytest.mark.parametrize("way", ["closed_form", "chunked"])
def test_only_the_wanted_gradients_are_computed(way):
    given = operands()
    given["weight"].requires_grad_(False)
    loss, expected = exact_cross_entropy(**given, way=way), reference(given)
    wanted = [given["hidden"], given["bias"]]
    ours, theirs = (torch.autograd.grad(x.sum(), wanted) for x in (loss, expected))
    assert distance(ours, theirs) < 1e-13


@pytest.mark.parametrize("way", ["closed_form", "chunked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_products_in_its_dtype_and_sums_in_float32(dtype, way):
    given = operands(torch.float32)
    found = []
    for kind in (way, "eager"):
        with torch.autocast("cpu", dtype):
            loss = exact_cross_entropy(**given, way=kind)
        assert loss.dtype == torch.float32
        found.append([loss, *gradients(loss, given)])
    truth = reference(given)
    truth = [truth, *gradients(truth, given)]
    ours, eager = ([distance([a], [b]) for a, b in zip(x, truth, strict=True)] for x in found)
    assert all(error <= 1.5 * other + 1e-6 for error, other in zip(ours, eager, strict=True))
    # The products are rounded as autocast rounds them, so the losses agree far better than they do with float32.
    assert distance(found[0][:1], found[1][:1]) < 1e-6 < ours[0]


class Allocations(TorchDispatchMode):
    """The largest number of bytes of a tensor that an operator returns in new memory."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and not function.is_view and "out" not in (options or {}):
            self.largest = max(self.largest, found.nbytes)
        return found


def test_chunks_never_hold_all_scores():
    given = operands(torch.float32, batch=64)
    given["weight"].requires_grad_(False)  # its gradient has its size
    with Allocations() as held:
        loss = exact_cross_entropy(**given, way="chunked")
        torch.autograd.grad(loss.sum(), given["hidden"])
    assert held.largest <= 4 * 64 * 256 < 4 * 64 * C


def test_an_evaluation_never_holds_all_scores():
    given = operands(torch.float32, batch=64)
    with Allocations() as held, torch.no_grad():
        exact_cross_entropy(**given, way="closed_form")
    assert held.largest <= 4 * 64 * 256


def test_the_default_follows_from_shapes_alone(monkeypatch):
    hidden, weight = torch.randn(B, D), torch.randn(C, D)
    assert default_way(hidden, weight) == "closed_form"
    monkeypatch.setattr(exact, "MAX_KEPT_SCORES", {"cpu": B * C - 1})
    assert default_way(hidden, weight) == "chunked"
    assert default_way(hidden.to("meta"), weight.to("meta")) == "eager"


@pytest.mark.parametrize("way", ["liger", "cut", "fast"])
def test_a_way_that_is_not_available_is_refused(way):
    with pytest.raises(ValueError, match=f"`way` must be one of 'eager', .*, got '{way}'"):
        exact_cross_entropy(**operands(), way=way)


@pytest.mark.parametrize("way", ["eager", "closed_form", "chunked"])
def test_a_batch_may_be_empty(way):
    assert exact_cross_entropy(**operands(batch=0), way=way).shape == (0,)


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="`way` must be"):
        Exhaustive(5, way="closed-form")
