"""`diagnose` measures the errors that its docstring defines."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyclass import ClassHead, HierarchicalHead, ScorerHead, diagnose
from manyclass.forms import LogSumExp
from manyclass.samplers import Exhaustive, Importance, Systematic, WithExplicit
from tests.tables import OBJECTIVES, SAMPLERS

C, D, B = 60, 5, 12


def setting(sampler, objective=None, **options):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=sampler, objective=objective, dtype=torch.float64, **options)
    with torch.no_grad():
        head.weight.normal_()
    return head, torch.randn(B, D, dtype=torch.float64), torch.randint(0, C, (B,))


@pytest.mark.parametrize("sampler", [Exhaustive(C), Systematic(torch.rand(C) + 0.1, C)])
def test_an_exact_head_has_no_error(sampler):
    report = diagnose(*setting(sampler), draws=2)
    assert report.rmse_log_z == pytest.approx(0, abs=1e-12)
    assert report.bias_log_z == pytest.approx(0, abs=1e-12)
    assert report.gamma_rmse == pytest.approx(0, abs=1e-6)
    assert report.sign_agreement == 1
    assert report.classes_scored == C
    assert report.rows_touched == C


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_it_agrees_with_the_full_matrices(name, similarity):
    """One draw gives the same errors as full matrices over all classes."""
    sampler = SAMPLERS[name](torch.rand(C) + 0.1, 9, 4)
    head, hidden, target = setting(sampler, similarity=similarity)
    report = diagnose(head, hidden, target, draws=1, generator=torch.Generator().manual_seed(1))
    seed = torch.Generator().manual_seed(1)
    candidates = sampler(target, hidden=hidden, exclude=target.unsqueeze(1), generator=seed)
    x, w = hidden, head.weight.detach().clone().requires_grad_()
    if similarity == "cosine":
        logits = head.scale * F.normalize(x, dim=1) @ F.normalize(w, dim=1).T + head.bias.detach()
    else:
        logits = x @ w.T + head.bias.detach()
    kappa = torch.zeros(B, C, dtype=torch.float64)
    slots = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0)
    kappa.scatter_add_(1, candidates.ids(), slots)
    kappa.scatter_(1, target.unsqueeze(1), 1.0)
    u = logits.detach().exp()
    z, z_approximate = u.sum(1), (kappa * u).sum(1)
    one_hot = F.one_hot(target, C)
    gamma = one_hot - u / z.unsqueeze(1)
    approximate = one_hot - kappa * u / z_approximate.unsqueeze(1)
    error = z_approximate.log() - z.log()
    assert report.rmse_log_z == pytest.approx(float(error.square().mean().sqrt()))
    assert report.bias_log_z == pytest.approx(float(error.mean()))
    expected = float((approximate - gamma).square().sum(1).mean().sqrt())
    assert report.gamma_rmse == pytest.approx(expected, abs=1e-7)
    touched = (kappa > 0).any(0)
    assert report.rows_touched == int(touched.sum())
    assert report.classes_scored == pytest.approx(float((~candidates.empty()).sum(1).double().mean()) + 1)
    signs = []
    for g in (approximate, gamma):
        (rows,) = torch.autograd.grad((logits * g).sum(), w, retain_graph=True)
        signs.append(torch.cat([rows, g.sum(0).unsqueeze(1)], 1)[touched].sign())
    assert report.sign_agreement == pytest.approx(float((signs[0] == signs[1]).double().mean()))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_diagnosed(name):
    objective = OBJECTIVES[name][0]
    report = diagnose(*setting(Importance(torch.ones(C), 10), objective), draws=4)
    has_z = isinstance(objective.form, LogSumExp)
    assert (report.rmse_log_z is not None) == (report.bias_log_z is not None) == has_z
    assert report.gamma_rmse > 0
    assert 0 <= report.sign_agreement <= 1
    assert "gradient signs right" in str(report)


def test_the_error_falls_with_k():
    errors = [diagnose(*setting(Importance(torch.ones(C), k)), draws=64).rmse_log_z for k in (4, 16, 256)]
    assert errors[0] > errors[1] > errors[2]


class Dot(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, hidden, ids):
        return hidden @ self.table[ids].transpose(1, 2)


def test_a_scorer_is_diagnosed_as_the_linear_head_it_equals():
    sampler = Systematic(torch.rand(C) + 0.1, 12)
    head, hidden, target = setting(sampler, bias=False)
    scorer = ScorerHead(Dot(head.weight.detach().clone()), sampler)
    ours = diagnose(scorer, hidden, target, draws=3, generator=torch.Generator().manual_seed(0))
    theirs = diagnose(head, hidden, target, draws=3, generator=torch.Generator().manual_seed(0))
    assert ours.rmse_log_z == pytest.approx(theirs.rmse_log_z)
    assert ours.gamma_rmse == pytest.approx(theirs.gamma_rmse)
    assert ours.rows_touched == theirs.rows_touched


def test_diagnosing_leaves_weights_and_gradients_unchanged():
    head, hidden, target = setting(WithExplicit(Importance(torch.ones(C), 5), "batch"))
    before = head.weight.detach().clone()
    hidden.requires_grad_()
    diagnose(head, hidden, target, draws=2)
    assert head.weight.grad is None
    assert hidden.grad is None
    assert torch.equal(head.weight, before)


def test_ignored_examples_are_left_out():
    head, hidden, target = setting(Importance(torch.ones(C), 5))
    target[3:] = -100
    ours = diagnose(head, hidden, target, draws=2, generator=torch.Generator().manual_seed(0))
    theirs = diagnose(head, hidden[:3], target[:3], draws=2, generator=torch.Generator().manual_seed(0))
    assert ours == theirs
    with pytest.raises(ValueError, match="`target` must hold a class that is not ignored, got 12 ignored ones"):
        diagnose(head, hidden, torch.full_like(target, -100))


def test_one_example_can_be_diagnosed():
    head, hidden, target = setting(Importance(torch.ones(C), 5))
    assert diagnose(head, hidden[:1], target[:1], draws=2).rmse_log_z > 0


HEADS = {
    "class vectors": lambda head: head,
    "module": lambda head: ScorerHead(Dot(head.weight.detach().clone()), head.sampler),
    "function": lambda head: ScorerHead(Dot(head.weight.detach().clone()).forward, head.sampler),
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", HEADS)
def test_the_result_does_not_depend_on_the_context(name, context):
    base, hidden, target = setting(Systematic(torch.rand(C) + 0.1, 12))
    head = HEADS[name](base)
    expected = diagnose(head, hidden, target, draws=3)
    with context():
        assert diagnose(head, hidden, target, draws=3) == expected
        # Tensors that are made there are special too.
        assert diagnose(head, hidden * 1, target + 0, draws=3) == expected


def test_a_function_is_diagnosed_as_the_module_it_equals():
    base, hidden, target = setting(Systematic(torch.rand(C) + 0.1, 12))
    reports = [diagnose(HEADS[name](base), hidden, target, draws=3) for name in ("function", "module")]
    assert reports[0] == reports[1]
    assert 0 < reports[0].sign_agreement <= 1


def test_scores_without_parameters_have_no_signs_of_gradients():
    table = torch.randn(C, D, dtype=torch.float64)
    head = ScorerHead(lambda hidden, ids: hidden @ table[ids].transpose(1, 2), Importance(torch.ones(C), 10))
    report = diagnose(head, *setting(head.sampler)[1:], draws=2)
    assert report.rmse_log_z > 0
    assert math.isnan(report.sign_agreement)


class Margin:
    """The likelihood with the target's score lowered by 2."""

    form = LogSumExp(target=True, kappa=True, target_transform=lambda score: score - 2)
    keeps_hits = normalised = False

    def __call__(self, target_score, scores, candidates):
        return self.form.loss(target_score, scores, candidates)


def test_log_z_of_an_objective_with_a_margin_includes_the_margin_once():
    head, hidden, target = setting(Exhaustive(C), Margin())
    scores = head.scores(hidden, torch.arange(C))
    lowered = scores - 2 * F.one_hot(target, C)
    error = lowered.logsumexp(1) - scores.logsumexp(1)
    assert diagnose(head, hidden, target, draws=1).bias_log_z == pytest.approx(float(error.mean().detach()))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_can_be_diagnosed_under_autocast(name):
    head, hidden, target = setting(Systematic(torch.rand(C) + 0.1, 12))
    head, hidden = HEADS[name](head.float()), hidden.float()
    expected = diagnose(head, hidden, target, draws=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = diagnose(head, hidden, target, draws=3)
    assert report.rmse_log_z == pytest.approx(expected.rmse_log_z, rel=0.1)
    assert report.sign_agreement == pytest.approx(expected.sign_agreement, abs=0.1)


def test_a_head_without_a_sampler_is_refused():
    with pytest.raises(TypeError, match="`head` must have a sampler to be diagnosed, got a HierarchicalHead"):
        diagnose(HierarchicalHead(4, 9), torch.randn(2, 4), torch.tensor([1, 2]))
