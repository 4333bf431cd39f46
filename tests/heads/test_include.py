"""`include` makes classes explicit for one example, whatever the head, the sampler and the objective."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from manyclass import ClassHead, HierarchicalHead, ScorerHead, diagnose
from manyclass.objectives import Likelihood, PlainImportance
from manyclass.samplers import Bernoulli, Exhaustive, Importance, Learned, Systematic, WithExplicit
from tests import reference
from tests.tables import OBJECTIVES, SAMPLERS

C, D, B = 24, 5, 9
WEIGHTS = 1 / torch.arange(1, C + 1, dtype=torch.float64)
HIDDEN = torch.randn(B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(C, (B,), generator=torch.Generator().manual_seed(1))
# Pads, repeats, the target and classes that the example excludes are among the included ones.
EXCLUDE = torch.randint(-1, C, (B, 3), generator=torch.Generator().manual_seed(2))
INCLUDE = torch.cat(
    [
        torch.randint(-1, C, (B, 4), generator=torch.Generator().manual_seed(3)),
        torch.where(torch.arange(B) % 3 == 0, -1, TARGET).unsqueeze(1),
        EXCLUDE[:, :1],
    ],
    1,
)
INCLUDE = torch.cat([INCLUDE, INCLUDE[:, :2]], 1)


def class_head(sampler, objective=None, **options):
    torch.manual_seed(4)
    head = ClassHead(D, C, sampler=sampler, objective=objective, dtype=torch.float64, **options)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return head


def scorer_head(sampler, objective=None):
    """Return a head with the scores of `class_head`."""
    twin = class_head(Exhaustive(C))

    def score(hidden, ids):
        return hidden @ twin.weight[ids].transpose(1, 2) + twin.bias[ids].unsqueeze(1)

    return ScorerHead(score, sampler, objective=objective)


def seed():
    return torch.Generator().manual_seed(5)


def slots_of(example, draw, keeps_hits):
    """Return (class, κ) of each slot that is not empty by the rules in words: a drawn class unless it is included."""
    excluded = set(EXCLUDE[example].tolist()) - {int(TARGET[example])}
    excluded |= set() if keeps_hits else {int(TARGET[example])}
    included = set(INCLUDE[example].tolist()) - excluded - {-1}
    ids, log_kappa = draw
    drawn = [(c, math.exp(x)) for c, x in zip(ids.tolist(), log_kappa.tolist(), strict=True) if x > -math.inf]
    return [(c, kappa) for c, kappa in drawn if c not in excluded | included] + [(c, 1.0) for c in sorted(included)]


@pytest.mark.parametrize("make", [class_head, scorer_head])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_reference(name, make, kernels):
    objective, known_as, options = OBJECTIVES[name]
    sampler = Systematic(WEIGHTS, 8)
    head, scores = make(sampler, objective), class_head(sampler).scores(HIDDEN, torch.arange(C)).tolist()
    # The batch shares the draw, so that it does not depend on what an example includes.
    plain = sampler(TARGET, generator=seed())
    hidden = HIDDEN.clone().requires_grad_()
    losses = head(hidden, TARGET, include=INCLUDE, exclude=EXCLUDE, reduction="none", generator=seed())
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    weight = class_head(sampler).weight
    for n in range(B):
        slots = slots_of(n, (plain.blocks[0].ids[0], plain.blocks[0].log_kappa[0]), objective.keeps_hits)
        target = int(TARGET[n])
        is_certain = objective.keeps_hits and target in [c for c, _ in slots] and target in INCLUDE[n].tolist()
        loss, gamma = reference.objective(
            known_as,
            target,
            scores[n][target],
            [(c, scores[n][c], kappa) for c, kappa in slots],
            num_classes=C,
            target_kappa=1.0 if is_certain else float(plain.target_log_kappa()[n].exp()),
            **options,
        )
        assert losses[n].item() == pytest.approx(loss, abs=1e-9)
        expected = -torch.tensor(gamma, dtype=torch.float64) @ weight.detach()
        torch.testing.assert_close(gradient[n], expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("objective", [Likelihood(), PlainImportance()])
@pytest.mark.parametrize("group_size", [None, 1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_with_all_classes_included_the_likelihood_is_the_cross_entropy(name, group_size, objective):
    include = torch.arange(C).flip(0).expand(B, -1)
    expected = F.cross_entropy(class_head(Exhaustive(C)).to_linear()(HIDDEN), TARGET, reduction="none")
    for make in (class_head, scorer_head):
        head = make(SAMPLERS[name](WEIGHTS, 6, group_size), objective)
        loss = head(HIDDEN, TARGET, include=include, reduction="none")
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        log_likelihood = head.approximate_log_likelihood(HIDDEN, TARGET, include=include)
        torch.testing.assert_close(log_likelihood, -expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("update", ["scored", "observed"])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_options_of_a_head_score_included_classes(similarity, update):
    head = class_head(Systematic(WEIGHTS, 6), similarity=similarity, update=update)
    include = torch.arange(C).expand(B, -1)
    loss = head(HIDDEN, TARGET, include=include)
    loss.backward()
    torch.testing.assert_close(loss, head.exact_loss(HIDDEN, TARGET), rtol=1e-12, atol=1e-12)
    touched = head.weight.grad.any(1)
    assert touched.all() if update == "scored" else touched.nonzero().flatten().tolist() == TARGET.unique().tolist()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_order_pads_and_repeats_change_nothing(name, kernels):
    head = class_head(Systematic(WEIGHTS, 8), OBJECTIVES[name][0])
    order = torch.randperm(INCLUDE.shape[1], generator=seed())
    variants = [INCLUDE, INCLUDE[:, order], F.pad(INCLUDE, (2, 3), value=-1), torch.cat([INCLUDE, INCLUDE], 1)]
    losses = [head(HIDDEN, TARGET, include=include, reduction="none", generator=seed()) for include in variants]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=1e-12)
    # Something is included, and it counts.
    plain = head(HIDDEN, TARGET, reduction="none", generator=seed())
    assert not torch.allclose(plain, losses[0])
    for empty in (torch.full((B, 2), -1), INCLUDE[:, :0]):
        loss = head(HIDDEN, TARGET, include=empty, reduction="none", generator=seed())
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)


def test_any_shape_of_targets_any_integer_and_ignored_examples():
    head = class_head(Systematic(WEIGHTS, 8))
    target = TARGET.clone()
    target[2] = -100
    kept = target != -100
    whole = head(
        HIDDEN.reshape(3, 3, D),
        target.reshape(3, 3),
        include=INCLUDE.int().reshape(3, 3, -1),
        reduction="none",
        generator=seed(),
    )
    flat = head(HIDDEN, TARGET, include=INCLUDE, reduction="none", generator=seed())
    torch.testing.assert_close(whole.flatten(), torch.where(kept, flat, 0.0))


def test_gradients_are_sparse_and_pads_touch_no_further_row(kernels):
    head = class_head(WithExplicit(None, torch.tensor([0]), num_classes=C), sparse=True)
    target = torch.tensor([3, 4])
    head(HIDDEN[:2], target, include=torch.tensor([[7, -1], [-1, 9]])).backward()
    for parameter in (head.weight, head.bias):
        assert parameter.grad.is_sparse
        assert set(parameter.grad.coalesce().indices()[0].tolist()) == {0, 3, 4, 7, 9}


@pytest.mark.parametrize("name", ["importance", "systematic", "bernoulli"])
@pytest.mark.parametrize("group_size", [None, 1])
def test_an_included_target_is_expected_once(name, group_size):
    sampler = SAMPLERS[name](WEIGHTS, 6, group_size)
    included = torch.arange(B) % 2 == 0
    include = torch.where(included, TARGET, (TARGET + 1) % C).unsqueeze(1)
    found = sampler(TARGET, include=include).target_log_kappa()
    assert (found[included] == 0).all()
    rest = sampler(TARGET, exclude=include.masked_fill(included.unsqueeze(1), -1)).target_log_kappa()
    torch.testing.assert_close(found[~included], rest[~included])
    # An excluded target stays as often drawn as the sampler says.
    excluded = sampler(TARGET, include=include, exclude=TARGET.unsqueeze(1)).target_log_kappa()
    assert (excluded != 0).all()


def test_learning_sees_the_shared_slots_alone(monkeypatch, kernels):
    """A class that an example includes needs no draw there, so that its probability counts as 0 in it."""
    observed = []
    monkeypatch.setattr(Learned, "observe", lambda self, observation: observed.append(observation))
    head = class_head(Learned(WEIGHTS, C))
    head(HIDDEN, TARGET, include=INCLUDE)
    monkeypatch.setattr(ClassHead, "fused_loss", lambda *arguments: None)
    head(HIDDEN, TARGET, include=INCLUDE)
    p = head.log_prob(HIDDEN, torch.arange(C)).exp()
    p = F.pad(p, (0, 1)).scatter(1, INCLUDE % (C + 1), 0.0)[:, :C].scatter(1, TARGET.unsqueeze(1), 0.0)
    for observation in observed:
        assert observation.candidates.included.shape == INCLUDE.shape
        torch.testing.assert_close(observation.probability(), p.square().mean(0).sqrt().detach())
    assert len(observed) == 2


@pytest.mark.parametrize("explicit", ["batch", torch.tensor([1, 2])])
def test_a_composition_learns_the_same_by_either_path(explicit, monkeypatch):
    head = class_head(WithExplicit(Learned(WEIGHTS, 8, every=3), explicit))
    other, before = copy.deepcopy(head), head.sampler.sampler.estimate.clone()
    for step in range(5):
        head(HIDDEN, TARGET, include=INCLUDE, generator=torch.Generator().manual_seed(step))
    monkeypatch.setattr(ClassHead, "fused_loss", lambda *arguments: None)
    for step in range(5):
        other(HIDDEN, TARGET, include=INCLUDE, generator=torch.Generator().manual_seed(step))
    ours, theirs = (each.sampler.sampler.estimate for each in (head, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not torch.equal(ours, before)


def test_included_classes_lower_the_error_that_is_diagnosed():
    head = class_head(Importance(WEIGHTS, 6))
    with torch.no_grad():
        head.weight.mul_(4)
    nearest = head.topk(HIDDEN, 4).ids
    plain, better = (diagnose(head, HIDDEN, TARGET, include=x, draws=50) for x in (None, nearest))
    assert better.rmse_log_z < 0.5 * plain.rmse_log_z
    assert plain.classes_scored < better.classes_scored <= plain.classes_scored + 4
    exact = diagnose(head, HIDDEN, TARGET, include=torch.arange(C).expand(B, -1), draws=2)
    assert exact.rmse_log_z == pytest.approx(0, abs=1e-9)
    assert exact.gamma_rmse == pytest.approx(0, abs=1e-6)


def test_excluded_classes_are_diagnosed_as_absent():
    report = diagnose(class_head(Exhaustive(C)), HIDDEN, TARGET, exclude=EXCLUDE, include=INCLUDE, draws=1)
    assert report.rmse_log_z == pytest.approx(0, abs=1e-12)
    assert report.gamma_rmse == pytest.approx(0, abs=1e-6)
    assert report.sign_agreement == 1
    excluded = [len(set(row) - {-1, t}) for row, t in zip(EXCLUDE.tolist(), TARGET.tolist(), strict=True)]
    assert report.classes_scored == pytest.approx(C - sum(excluded) / B)


def test_a_tree_needs_no_included_classes():
    head = HierarchicalHead(D, C, dtype=torch.float64)
    assert torch.equal(head(HIDDEN, TARGET, include=INCLUDE), head(HIDDEN, TARGET))
    with pytest.raises(ValueError, match=r"`include` must lie in \[0, 24\) \(or be -1, a pad\), got 24"):
        head(HIDDEN, TARGET, include=torch.full((B, 1), C))


def test_a_fixed_set_and_the_included_classes_are_a_subset_softmax():
    """With nothing drawn, the likelihood is the softmax over the target and what the example includes."""
    head = class_head(WithExplicit(None, torch.tensor([0]), num_classes=C))
    include = (TARGET.unsqueeze(1) + torch.tensor([1, 2, 2, 5])) % C
    loss = head(HIDDEN, TARGET, include=include, exclude=torch.zeros(B, 1, dtype=torch.int64), reduction="none")
    for n in range(B):
        classes = [int(TARGET[n]), *sorted(set(include[n].tolist()) - {0, int(TARGET[n])})]
        scores = head.scores(HIDDEN[n], torch.tensor(classes))
        torch.testing.assert_close(loss[n], -scores.log_softmax(0)[0])


@pytest.mark.parametrize("group_size", [None, 4])
def test_a_head_of_half_precision_includes_classes_in_float32(group_size):
    head = class_head(Bernoulli(WEIGHTS, 6, group_size=group_size)).bfloat16()
    loss = head(HIDDEN.bfloat16(), TARGET, include=torch.arange(C).expand(B, -1))
    assert loss.dtype == torch.float32
    expected = class_head(Exhaustive(C)).exact_loss(HIDDEN, TARGET)
    torch.testing.assert_close(loss.double(), expected, rtol=0.02, atol=0.02)
