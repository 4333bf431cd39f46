"""Every way to the exact loss gives the losses and gradients of F.cross_entropy, and heads take it where they can."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from manyclass import ClassHead
from manyclass.forms import LogSumExp
from manyclass.heads import linear
from manyclass.kernels import (
    EXACT_WAYS,
    all_classes,
    available_ways,
    default_way,
    exact,
    exact_cross_entropy,
    fastest,
    fastest_way,
)
from manyclass.objectives import Likelihood, PlainImportance, SubsetSoftmax
from manyclass.optim import RowAdagrad, RowAdam, RowSGD
from manyclass.samplers import Exhaustive

B, C, D = 9, 700, 5
OWN = ["eager", "closed_form", "chunked"]
WAYS = [
    *OWN,
    pytest.param(
        "linear_cross_entropy",
        marks=pytest.mark.skipif(
            not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
        ),
    ),
]

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def runs_of_256_classes(monkeypatch):
    """Let what is not kept go through three runs of classes."""
    monkeypatch.setattr(all_classes, "RUN_SCORES", {"cpu": 1, "cuda": 1})


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


def operands(dtype=torch.float64, *, batch=B, bias=True, excluded=0, scale=1.0):
    torch.manual_seed(0)
    hidden = (scale * torch.randn(batch, D, dtype=dtype)).requires_grad_()
    weight = torch.randn(C, D, dtype=dtype).requires_grad_()
    target = torch.randint(C, (batch,))
    exclude = torch.randint(-1, C, (batch, excluded))
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": torch.randn(C, dtype=dtype).requires_grad_() if bias else None,
        "target": target,
        "exclude": exclude.masked_fill(exclude == target.unsqueeze(1), -1) if excluded else None,
    }


def parameters(given):
    return [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]


def gradients(loss, given, **options):
    upstream = torch.linspace(-1, 2, len(loss), dtype=loss.dtype)
    return torch.autograd.grad(loss, parameters(given), upstream, **options)


def reference(given):
    scores = F.linear(given["hidden"], given["weight"], given["bias"])
    if given["exclude"] is not None:
        hit = (torch.arange(C) == given["exclude"].unsqueeze(2)).any(1)
        scores = scores.masked_fill(hit, -math.inf)
    return F.cross_entropy(scores, given["target"], reduction="none")


def distance(ours, theirs):
    with torch.no_grad():
        return max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(ours, theirs, strict=True))


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
    """The largest number of elements of a tensor that an operator returns in new memory."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and not function.is_view and "out" not in (options or {}):
            self.largest = max(self.largest, found.numel())
        return found


def test_chunks_never_hold_all_scores():
    given = operands(torch.float32, batch=64)
    given["weight"].requires_grad_(False)  # its gradient has its size
    with Allocations() as held:
        loss = exact_cross_entropy(**given, way="chunked")
        torch.autograd.grad(loss.sum(), given["hidden"])
    assert held.largest <= 64 * 256 < 64 * C


def test_an_evaluation_never_holds_all_scores():
    given = operands(torch.float32, batch=64)
    with Allocations() as held, torch.no_grad():
        exact_cross_entropy(**given, way="closed_form")
    assert held.largest <= 64 * 256


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


def test_the_fastest_way_is_measured_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(fastest, "MAX_TIMED_CLASSES", 100)
    given = operands(torch.float32, excluded=3)
    measured = []

    def run(hidden, weight, *, way, **options):
        measured.append((way, len(weight), int(options["target"].max()), int(options["exclude"].max())))
        clock[0] += {"eager": 3.0, "closed_form": 1.0, "chunked": 2.0}[way]
        return exact_cross_entropy(hidden, weight, way=way, **options)

    clock = [0.0]
    monkeypatch.setattr(fastest, "exact_cross_entropy", run)
    monkeypatch.setattr(fastest.time, "perf_counter", lambda: clock[0])
    assert fastest_way(**given) == ("closed_form", C / 100)
    assert {way for way, *_ in measured} == set(OWN)
    # A slow way is measured once.
    assert [way for way, *_ in measured].count("eager") == 1
    assert all(number == 100 and most < 100 for _, number, *ends in measured for most in ends)
    assert all(parameter.grad is None for parameter in parameters(given))
    # If the scores are too many to keep, ways that keep them are not tried.
    monkeypatch.setattr(exact, "MAX_KEPT_SCORES", {"cpu": 1})
    assert fastest_way(**given) == ("chunked", 2 * C / 100)


def test_a_way_that_fails_is_not_the_fastest(monkeypatch):
    def fail(*operands, **options):
        raise AssertionError("no such GPU")

    monkeypatch.setitem(exact._WAYS, "closed_form", fail)
    monkeypatch.setitem(exact._WAYS, "chunked", fail)
    assert fastest_way(**operands(excluded=1))[0] == "eager"


@pytest.fixture
def taken(monkeypatch):
    """Note the ways that heads ask for."""
    ways = []

    def note(*arguments, way, **options):
        ways.append(way)
        return exact_cross_entropy(*arguments, way=way, **options)

    monkeypatch.setattr(linear, "exact_cross_entropy", note)
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


@pytest.mark.parametrize(("factor", "expected"), [(0.9, "closed_form"), (0.5, "chunked")])
def test_on_the_cpu_a_small_difference_of_speed_does_not_choose_the_way(monkeypatch, factor, expected):
    clock, run = [0.0], exact_cross_entropy

    def timed(*arguments, way, **options):
        clock[0] += {"closed_form": 1.0, "chunked": factor}.get(way, 2.0)
        return run(*arguments, way=way, **options)

    monkeypatch.setattr(fastest, "exact_cross_entropy", timed)
    monkeypatch.setattr(fastest.time, "perf_counter", lambda: clock[0])
    assert fastest_way(**operands())[0] == expected


@pytest.mark.parametrize("way", ["eager", "closed_form", "chunked"])
def test_a_batch_may_be_empty(way):
    assert exact_cross_entropy(**operands(batch=0), way=way).shape == (0,)


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="`way` must be"):
        Exhaustive(5, way="closed-form")


def test_a_large_batch_is_timed_on_some_of_its_examples(monkeypatch):
    timed = []

    def run(hidden, weight, **operands):
        timed.append(len(hidden))
        return exact_cross_entropy(hidden, weight, **operands)

    monkeypatch.setattr(fastest, "MAX_TIMED_SCORES", 20 * 130)
    monkeypatch.setattr(fastest, "exact_cross_entropy", run)
    target = torch.zeros(300, dtype=torch.int64)
    way, seconds = fastest_way(torch.randn(300, 4), torch.randn(20, 4), target=target)
    assert set(timed) == {130}
    assert way in EXACT_WAYS
    assert seconds > 0
