"""Learned: learning lowers the error of log Z̃ and keeps draws unbiased."""

import copy

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.objectives import Likelihood, LogisticRanking, LogSumExp
from manyclass.samplers import Learned, Systematic, WithExplicit

C, D, B = 60, 5, 32


def head_and_batch(sampler, seed=0, **options):
    torch.manual_seed(seed)
    head = ClassHead(D, C, sampler=sampler, **options).double()
    with torch.no_grad():
        head.weight.copy_(1.5 * torch.randn(C, D))
    return head, torch.randn(B, D, dtype=torch.float64), torch.randint(C, (B,))


def mean_square(head, hidden, target):
    """Return the mean square of each class's probability over the examples, taken as 0 where it is the target."""
    with torch.no_grad():
        p = head.log_prob(hidden, torch.arange(C)).exp()
    return p.scatter(1, target.unsqueeze(1), 0.0).square().mean(0)


def train(head, hidden, target, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        head(hidden, target, generator=generator)


def test_the_estimate_converges_to_the_mean_square_probability():
    head, hidden, target = head_and_batch(Learned(torch.ones(C), 30, forget=0.02, every=20))
    train(head, hidden, target, 1500)
    expected = mean_square(head, hidden, target)
    # Z̃ is noisy, and 1/Z̃ a little biased.
    torch.testing.assert_close(head.sampler.estimate.sqrt(), expected.sqrt(), rtol=0.25, atol=5e-3)


@pytest.mark.parametrize(
    ("steps", "included", "group_size"), [(0, 0, None), (200, 0, None), (200, 3, None), (200, 3, 9)]
)
def test_draws_are_unbiased_before_and_after_learning(steps, included, group_size):
    head, hidden, target = head_and_batch(Learned(torch.rand(C) + 0.1, 15, every=20, group_size=group_size))
    train(head, hidden, target, steps)
    g = torch.randn(C, dtype=torch.float64)
    include = torch.randint(-1, C, (B, included))
    found, generator = [], torch.Generator().manual_seed(2)
    for _ in range(4000):
        candidates = head.sampler(target, include=include, exclude=target.unsqueeze(1), generator=generator)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        found.append((kappa * g[candidates.ids()]).sum(1))
    found = torch.stack(found)
    error = (found.mean(0) - (g.sum() - g[target])).abs()
    assert (error <= 4.5 * found.std(0) / len(found) ** 0.5 + 1e-9).all()


def test_groups_of_examples_have_draws_at_other_offsets_of_the_same_design():
    sampler = Learned(torch.ones(C), 20, group_size=9)
    candidates = sampler(torch.arange(B))
    (block,) = candidates.blocks
    assert block.ids.shape == (4, 20)
    assert len({tuple(sorted(ids)) for ids in block.ids.tolist()}) > 1
    assert torch.equal(candidates.ids()[:8], block.ids[:1].expand(8, -1))
    assert torch.equal(candidates.ids()[8:16], block.ids[1:2].expand(8, -1))
    torch.testing.assert_close(block.log_kappa.exp(), torch.full((4, 20), C / 20, dtype=torch.float64))


def test_classes_that_are_certain_are_in_the_draw_of_each_group():
    sampler = Learned(torch.tensor([1000.0, *[1.0] * (C - 1)]), 5, group_size=8)
    (block,) = sampler(torch.arange(B)).blocks
    assert (block.ids == 0).sum(1).tolist() == [1] * 4
    assert (block.log_kappa[block.ids == 0] == 0).all()


def test_with_groups_it_learns_from_the_first():
    head, hidden, target = head_and_batch(Learned(torch.ones(C), 30, forget=0.02, every=20, group_size=8))
    train(head, hidden, target, 1500)
    expected = mean_square(head, hidden[:8], target[:8])
    torch.testing.assert_close(head.sampler.estimate.sqrt(), expected.sqrt(), rtol=0.25, atol=0.01)


@pytest.mark.parametrize("explicit", ["batch", torch.tensor([0, 4, 7])], ids=["batch", "set"])
def test_with_groups_and_an_explicit_set_it_learns_the_same_classes(explicit):
    """The set and the draws of the groups are two blocks of one step."""
    head, hidden, _ = head_and_batch(WithExplicit(Learned(torch.ones(C), 20, group_size=8), explicit))
    target, inner = torch.arange(B), head.sampler.sampler
    before = inner.estimate.clone()
    candidates = head.sampler(target, exclude=target.unsqueeze(1), generator=torch.Generator().manual_seed(1))
    assert [block.ids.shape[0] for block in candidates.blocks] == [1, 4]
    train(head, hidden, target, 1)
    drawn = candidates.blocks[1].ids[0]
    learned = set(drawn.tolist()) - set(target.tolist() if explicit == "batch" else explicit.tolist())
    assert set((inner.estimate != before).nonzero().squeeze(1).tolist()) == learned
    target_score, scores = head.candidate_scores(hidden, target, candidates)
    log_z = target_score + head.objective(target_score, scores, candidates)
    square = (scores - log_z.unsqueeze(1)).exp().detach().square()[:8, -20:].mean(0)
    # One step moves the estimate by the share forget / π towards the mean square of u/Z̃.
    moved = before[drawn] + 0.005 * candidates.blocks[1].log_kappa[0].exp() * (square - before[drawn])
    torch.testing.assert_close(inner.estimate[drawn], moved)


def test_the_error_is_below_that_of_systematic_sampling():
    learned, hidden, target = head_and_batch(Learned(torch.ones(C), 15, every=20))
    train(learned, hidden, target, 400)
    plain, _, _ = head_and_batch(Systematic(torch.ones(C), 15))
    errors = [
        diagnose(head, hidden, target, draws=200, generator=torch.Generator().manual_seed(0)).rmse_log_z
        for head in (learned, plain)
    ]
    assert errors[0] < 0.6 * errors[1]


def test_the_closed_form_and_autograd_give_the_same_estimates(kernels, monkeypatch):
    head, hidden, target = head_and_batch(Learned(torch.ones(C), 20, every=3))
    other = copy.deepcopy(head)
    train(head, hidden, target, 10)
    monkeypatch.setattr(ClassHead, "fused_loss", lambda *arguments: None)
    train(other, hidden, target, 10)
    torch.testing.assert_close(head.sampler.estimate, other.sampler.estimate, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(head.sampler.estimate, torch.full_like(head.sampler.estimate, 1 / C**2))


def test_the_observed_probabilities_include_a_transform_of_the_targets_score(monkeypatch):
    class Margin(Likelihood):
        form = LogSumExp(target=True, kappa=True, target_transform=lambda score: score - 1)

    observed = []
    monkeypatch.setattr(Learned, "observe", lambda self, observation: observed.append(observation.probability()))
    head, hidden, target = head_and_batch(Learned(torch.ones(C), C), objective=Margin())
    head(hidden, target)
    at_target = torch.nn.functional.one_hot(target, C)
    p = (head.scores(hidden, torch.arange(C)) - at_target).softmax(1).masked_fill(at_target == 1, 0.0)
    torch.testing.assert_close(observed[0], p.square().mean(0).sqrt())


def test_only_training_steps_change_the_estimates():
    head, hidden, target = head_and_batch(Learned(torch.ones(C), 20))
    before = head.sampler.estimate.clone()
    with torch.no_grad():
        head(hidden, target)
    diagnose(head, hidden, target)
    head.eval()
    head(hidden, target)
    assert torch.equal(head.sampler.estimate, before)
    ranking, hidden, target = head_and_batch(Learned(torch.ones(C), 20), objective=LogisticRanking())
    ranking(hidden, target)
    assert torch.equal(ranking.sampler.estimate, before)


def test_the_estimates_are_part_of_the_state():
    head, hidden, target = head_and_batch(Learned(torch.ones(C), 20, every=5))
    train(head, hidden, target, 33)
    other, _, _ = head_and_batch(Learned(torch.ones(C), 20, every=5), seed=9)
    other.load_state_dict(head.state_dict())
    losses = [h(hidden, target, generator=torch.Generator().manual_seed(4)).item() for h in (head, other)]
    assert losses[0] == losses[1]
    # Both heads go on to learn the same.
    for each in (head, other):
        train(each, hidden, target, 13)
    assert torch.equal(head.sampler.estimate, other.sampler.estimate)


def test_a_resized_head_keeps_its_estimates():
    head, hidden, target = head_and_batch(Learned(ClassCounts(torch.ones(C)), 20, every=5))
    train(head, hidden, target, 40)
    known = head.sampler.estimate.clone()
    head.resize(C + 9)
    assert torch.equal(head.sampler.estimate[:C], known)
    assert head(hidden, target).isfinite()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Learned(torch.ones(5), 6), r"`k` must be in \[1, 5\], got 6"),
        (lambda: Learned(torch.ones(5), 3, forget=0.0), r"`forget` must be finite and above 0, got 0.0"),
        (lambda: Learned(torch.ones(5), 3, mix=-1.0), r"`mix` must be finite and above 0, got -1.0"),
        (lambda: Learned(torch.ones(5), 3, every=0), r"`every` must be at least 1, got 0"),
        (lambda: Learned(torch.ones(5), 3, group_size=0), r"`group_size` must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
