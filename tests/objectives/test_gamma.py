"""γ of every objective is the paper's, for every grouping of candidates, with hits, exclusions and padding."""

import math

import pytest
import torch

from manyclass.candidates import Block, Candidates
from manyclass.kernels import exclude_hits
from tests import reference
from tests.tables import OBJECTIVES

C, B = 12, 7
SHARINGS = {"batch": (1,), "groups": (3,), "example": (B,), "all of them": (1, 3, B, 1)}


def random_candidates(groups, generator, *, ordered, keeps_hits, target, include):
    """Return blocks with every kind of slot: repeats, hits, padding, excluded and included classes."""
    blocks = []
    for g in groups:
        ids = torch.randint(0, C, (g, 5), generator=generator)
        ids[:, 1] = ids[:, 0]
        log_kappa = torch.randn(g, 5, dtype=torch.float64, generator=generator)
        log_kappa[:, 2] = -math.inf
        order = torch.randperm(B, generator=generator) if ordered else None
        blocks.append(Block(ids, log_kappa, order))
    excluded = torch.randint(-1, C, (B, 2), generator=generator)
    if not keeps_hits:
        excluded = torch.cat([target.unsqueeze(1), excluded], 1)
    kappa = torch.randn(B, dtype=torch.float64, generator=generator)
    included = None
    if include:
        included = torch.rand(B, C, generator=generator).argsort(1)[:, :4]
        included = included.masked_fill((included.unsqueeze(2) == excluded.unsqueeze(1)).any(2), -1)
        excluded = torch.cat([excluded, included], 1)
    return Candidates(tuple(blocks), excluded, lambda: kappa, C, included)


def gamma_by_class(target, ids, gamma_target, gamma_slots):
    gamma = torch.zeros(len(target), C, dtype=torch.float64)
    gamma.scatter_add_(1, target.unsqueeze(1), gamma_target.unsqueeze(1))
    return gamma.scatter_add_(1, ids, gamma_slots)


def evaluate(objective, target_score, scores, candidates):
    """Return losses and -∂loss/∂score."""
    target_score, scores = target_score.clone().requires_grad_(), scores.clone().requires_grad_()
    widths = [block.ids.shape[1] for block in candidates.parts()]
    loss = objective(target_score, exclude_hits(list(scores.split(widths, 1)), candidates), candidates)
    gradients = torch.autograd.grad(loss.sum(), (target_score, scores))
    return loss.detach(), -gradients[0], -gradients[1]


@pytest.mark.parametrize("include", [False, True], ids=["", "include"])
@pytest.mark.parametrize("ordered", [False, True], ids=["runs", "sorted"])
@pytest.mark.parametrize("groups", SHARINGS.values(), ids=SHARINGS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gamma_is_the_papers(name, groups, ordered, include):
    objective, known_as, options = OBJECTIVES[name]
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(0, C, (B,), generator=generator)
        candidates = random_candidates(
            groups, generator, ordered=ordered, keeps_hits=objective.keeps_hits, target=target, include=include
        )
        ids, empty, kappa = candidates.ids(), candidates.empty(), candidates.log_kappa().exp()
        target_score = torch.randn(B, dtype=torch.float64, generator=generator)
        scores = 2 * torch.randn(ids.shape, dtype=torch.float64, generator=generator)
        loss, gamma_target, gamma_slots = evaluate(objective, target_score, scores, candidates)
        gamma = gamma_by_class(target, ids, gamma_target, gamma_slots)
        for n in range(B):
            slots = [
                (int(ids[n, j]), float(scores[n, j]), float(kappa[n, j]))
                for j in range(ids.shape[1])
                if not empty[n, j]
            ]
            expected_loss, expected = reference.objective(
                known_as,
                int(target[n]),
                float(target_score[n]),
                slots,
                num_classes=C,
                target_kappa=float(candidates.target_log_kappa()[n].exp()),
                **options,
            )
            assert float(loss[n]) == pytest.approx(expected_loss, abs=1e-10)
            assert gamma[n].tolist() == pytest.approx(expected, abs=1e-10)


def example(log_kappa, *, excluded=None, target_log_kappa=0.0):
    """Return candidates of one example with slots of classes 1, 2, …; its target is class 0."""
    k = len(log_kappa)
    block = Block(torch.arange(1, k + 1).unsqueeze(0), torch.tensor([log_kappa], dtype=torch.float64))
    excluded = torch.empty(1, 0, dtype=torch.int64) if excluded is None else torch.tensor([excluded])
    kappa = torch.tensor([target_log_kappa], dtype=torch.float64)
    return Candidates((block,), excluded, lambda: kappa, C)


@pytest.mark.parametrize("how", ["padding", "excluded"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_empty_draw_is_defined(name, how):
    objective, _, options = OBJECTIVES[name]
    candidates = example([-math.inf, -math.inf]) if how == "padding" else example([0.5, 0.5], excluded=[2, 1])
    target_score = torch.tensor([0.3], dtype=torch.float64)
    loss, gamma_target, gamma_slots = evaluate(objective, target_score, torch.randn(1, 2).double(), candidates)
    assert (gamma_slots == 0).all()
    if name.startswith("noise contrastive"):
        # Only the term of the target is left.
        assert float(loss) == pytest.approx(reference.softplus(-(0.3 - options.get("log_z", 0.0))))
    else:
        assert float(loss) == 0
        assert float(gamma_target) == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_changes_nothing_whatever_its_score(name):
    objective, _, _ = OBJECTIVES[name]
    target_score, scores = torch.randn(1).double(), torch.randn(1, 3).double()
    loss, _, gamma = evaluate(objective, target_score, scores, example([0.1, 0.7, -0.4]))
    for score in (0.0, 1e4, math.inf, -math.inf):
        padded = torch.cat([scores, torch.tensor([[score]], dtype=torch.float64)], 1)
        padded_loss, _, padded_gamma = evaluate(objective, target_score, padded, example([0.1, 0.7, -0.4, -math.inf]))
        torch.testing.assert_close(padded_loss, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(padded_gamma[:, :3], gamma, rtol=1e-12, atol=1e-12)
        assert padded_gamma[0, 3] == 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_order_of_candidates_changes_nothing(name):
    objective, _, _ = OBJECTIVES[name]
    log_kappa, scores = [0.1, 0.7, -0.4, 2.0], torch.randn(1, 4).double()
    loss, _, gamma = evaluate(objective, torch.zeros(1).double(), scores, example(log_kappa))
    order = [2, 0, 3, 1]
    candidates = example([log_kappa[i] for i in order])
    other, _, permuted = evaluate(objective, torch.zeros(1).double(), scores[:, order], candidates)
    torch.testing.assert_close(other, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(permuted, gamma[:, order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradcheck(name):
    objective, _, options = OBJECTIVES[name]
    candidates = example([0.1, 0.7, -0.4, -math.inf])
    generator = torch.Generator().manual_seed(0)
    target_score = torch.randn(1, dtype=torch.float64, generator=generator, requires_grad=True)
    scores = torch.randn(1, 4, dtype=torch.float64, generator=generator)
    if name == "hinge ranking":
        # Finite differences need a distance from the kink.
        distance = options["margin"] - target_score.detach() + scores
        assert distance.abs().min() > 1e-3
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda t, s: objective(t, s, candidates), (target_score, scores), eps=1e-6)


def test_the_hinge_is_flat_at_its_kink():
    objective, _, _ = OBJECTIVES["hinge ranking"]
    target_score, scores = torch.tensor([1.0]).double(), torch.tensor([[0.0]]).double()
    loss, gamma_target, gamma_slots = evaluate(objective, target_score, scores, example([0.0]))
    assert float(loss) == float(gamma_target) == float(gamma_slots) == 0


def test_blackout_stays_finite_if_one_class_has_all_the_probability():
    objective, _, _ = OBJECTIVES["blackout"]
    for scores, target in (([300.0, 0.0], 0.0), ([0.0, 0.0], 300.0), ([300.0, 300.0], 300.0)):
        scores = torch.tensor([scores], dtype=torch.float32)
        loss, *gamma = evaluate(objective, torch.tensor([target]), scores, example([0.0, 0.0]))
        assert torch.isfinite(loss).all()
        assert all(torch.isfinite(g).all() for g in gamma)


def test_blackouts_gamma_leaves_the_unit_interval():
    objective, _, _ = OBJECTIVES["blackout"]
    _loss, gamma_target, _ = evaluate(
        objective, torch.tensor([-5.0]).double(), torch.tensor([[5.0]]).double(), example([0.0])
    )
    assert 1 < float(gamma_target) <= 2


def test_noise_contrastive_learns_its_log_z():
    objective, _, _ = OBJECTIVES["noise contrastive, learned"]
    candidates = example([0.1, 0.7])
    objective.zero_grad()
    objective(torch.zeros(1), torch.zeros(1, 2), candidates).sum().backward()
    fixed = OBJECTIVES["noise contrastive"][0]
    shift = torch.tensor(1.5, requires_grad=True)
    fixed(torch.zeros(1) - shift, torch.zeros(1, 2) - shift, candidates).sum().backward()
    torch.testing.assert_close(objective.log_z.grad, shift.grad)
