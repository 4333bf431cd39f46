"""InBatch: the targets of a batch as candidates give unbiased sums if targets are distributed as the counts."""

import pytest
import torch

from manyclass import ClassCounts, ClassHead
from manyclass.objectives import Likelihood
from manyclass.samplers import InBatch

C = 6
WEIGHTS = torch.tensor([5.0, 1.0, 2.0, 8.0, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(("k", "power", "include"), [(0, 1.0, None), (4, 1.0, None), (4, 0.0, None), (0, 1.0, [1, 3])])
def test_sums_are_unbiased_over_random_batches(k, power, include):
    sampler = InBatch(WEIGHTS, k, power=power)
    assert not sampler.unbiased
    g = torch.tensor([1.0, -2.0, 3.0, 0.5, 2.0, -1.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    include = None if include is None else torch.tensor([include] * 5)
    errors = []
    for _ in range(4000):
        targets = torch.multinomial(WEIGHTS, 5, replacement=True, generator=generator)
        candidates = sampler(targets, include=include, exclude=targets.unsqueeze(1), generator=generator)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        error = (kappa * g[candidates.ids()]).sum(1) - (g.sum() - g[targets])
        # The sum over the examples of each target: whatever the target, the others are drawn from the counts.
        errors.append(torch.zeros(C, dtype=torch.float64).index_add_(0, targets, error))
    found = torch.stack(errors)
    assert (found.mean(0).abs() <= 4.5 * found.std(0) / len(found) ** 0.5).all()


def test_kappa_accounts_for_targets_and_drawn_classes_together():
    f = WEIGHTS / WEIGHTS.sum()
    target = torch.tensor([0, 3, 3, 4])
    candidates = InBatch(WEIGHTS, 7, power=0.0)(target, generator=torch.Generator().manual_seed(0))
    expected = 1 / (3 * f + 7 / C)
    torch.testing.assert_close(candidates.log_kappa()[0].exp(), expected[candidates.ids()[0]])
    torch.testing.assert_close(candidates.target_log_kappa().exp(), expected[target])
    assert torch.equal(candidates.ids()[0, :4], target)


def test_the_loss_applies_kappa_to_other_targets_only():
    torch.manual_seed(0)
    head = ClassHead(4, C, sampler=InBatch(WEIGHTS), bias=False).double()
    hidden, target = torch.randn(5, 4).double(), torch.tensor([0, 3, 3, 1, 5])
    loss = head(hidden, target, reduction="none")
    f = WEIGHTS / WEIGHTS.sum()
    scores = hidden @ head.weight.detach().T
    for i, t in enumerate(target.tolist()):
        others = [c for c in target.tolist() if c != t]
        z = scores[i, t].exp() + sum(scores[i, c].exp() / (4 * f[c]) for c in others)
        assert loss[i].item() == pytest.approx(float(z.log() - scores[i, t]))
    loss.sum().backward()
    assert isinstance(head.objective, Likelihood)


def test_the_loss_of_a_batch_of_one_is_zero():
    head = ClassHead(4, C, sampler=InBatch(WEIGHTS))
    assert head(torch.randn(1, 4), torch.tensor([2])).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("k", [0, 5])
def test_ignored_examples_are_no_candidates_where_values_are_not_read(monkeypatch, k):
    torch.manual_seed(0)
    head = ClassHead(4, 20, sampler=InBatch(torch.arange(1.0, 21.0), k=k))
    hidden, target = torch.randn(8, 4), torch.tensor([3, 10, 10] + [-100] * 5)
    losses = []
    for reads in (True, False):
        monkeypatch.setattr("manyclass._check.reads_values", lambda _, reads=reads: reads)
        generator = torch.Generator().manual_seed(0)
        losses.append(head(hidden, target, generator=generator))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(losses[0], head(hidden[:3], target[:3], generator=torch.Generator().manual_seed(0)))
    assert head(hidden, torch.full((8,), -100)) == 0


def test_refresh_and_resize_follow_the_counts():
    counts = ClassCounts(torch.ones(C))
    sampler = InBatch(counts, 2)
    counts.update(torch.zeros(10, dtype=torch.long))
    sampler.refresh()
    target = torch.tensor([0, 1])
    expected = 1 / (3 * torch.tensor([11.0, 1.0], dtype=torch.float64) / 16)
    torch.testing.assert_close(sampler(target).target_log_kappa().exp(), expected)
    sampler.resize(C + 2)
    assert sampler.num_classes == C + 2
    assert sampler(torch.tensor([C + 1])).target_log_kappa().isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InBatch(WEIGHTS, -1), r"`k` must be at least 0, got -1"),
        (lambda: InBatch(-WEIGHTS), r"`counts` must be finite and not negative, got -5.0 at position 0"),
        (
            lambda: InBatch(ClassCounts(torch.tensor([1.0, 0.0]), smoothing=0))(torch.tensor([0])),
            r"`counts` must be above 0 .* position 1",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
