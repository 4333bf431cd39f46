"""Clustered: clusters change the variance of a draw, never its expectation."""

import copy

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.samplers import Clustered, Importance
from manyclass.samplers._clusters import Clusters

C, D = 40, 6
TARGETS = 8


def model(seed=0, scale=1.0, batch=9):
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(5, D, generator=generator)
    vectors = centres[torch.arange(C) % 5] + 0.3 * torch.randn(C, D, generator=generator)
    weights = torch.rand(C, generator=generator, dtype=torch.float64) + 0.05
    return scale * vectors, weights, torch.randn(batch, D, generator=generator)


def check_zero_on_average(errors):
    """Check the errors [calls, B] of a batch, summed over the examples of each of 8 targets."""
    found = torch.stack(errors).reshape(len(errors), -1, TARGETS).sum(1)
    assert (found.mean(0).abs() <= 4.5 * found.std(0) / len(found) ** 0.5 + 1e-9).all()


def check_unbiased(sampler, hidden, calls=400):
    g = 1 + torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    target = torch.arange(len(hidden)) % TARGETS
    generator, errors = torch.Generator().manual_seed(1), []
    for _ in range(calls):
        candidates = sampler(target, hidden=hidden, exclude=target.unsqueeze(1), generator=generator)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        errors.append((kappa * g[candidates.ids()]).sum(1) - (g.sum() - g[target]))
    check_zero_on_average(errors)


@pytest.mark.parametrize("explicit", [0, 3])
@pytest.mark.parametrize("group_size", [1, 2, 3, 16])
def test_draws_are_unbiased_for_every_group_size(explicit, group_size):
    vectors, weights, hidden = model(batch=320)
    sampler = Clustered(weights, 12, explicit=explicit, group_size=group_size, clusters=5)
    sampler.attach(vectors)
    check_unbiased(sampler, hidden)


def test_draws_are_unbiased_with_stale_clusters():
    vectors, weights, hidden = model(batch=320)
    sampler = Clustered(weights, 12, group_size=4, clusters=5, every=10**6)
    vectors = vectors.clone()
    sampler.attach(vectors)
    sampler(torch.arange(320) % C, hidden=hidden)
    vectors.copy_(model(seed=5)[0])
    check_unbiased(sampler, hidden)


def test_draws_are_unbiased_with_empty_clusters():
    vectors, weights, hidden = model(batch=320)
    vectors[:] = vectors[0]
    sampler = Clustered(weights, 8, group_size=4, clusters=7)
    sampler.attach(vectors)
    check_unbiased(sampler, hidden)


def test_target_log_kappa_matches_how_often_targets_are_drawn():
    vectors, weights, hidden = model(batch=320)
    sampler = Clustered(weights, 12, explicit=2, group_size=4, clusters=5)
    sampler.attach(vectors)
    target, generator, errors = torch.arange(320) % TARGETS, torch.Generator().manual_seed(0), []
    for _ in range(100):
        candidates = sampler(target, hidden=hidden, generator=generator)
        drawn = ((candidates.ids() == target.unsqueeze(1)) & ~candidates.empty()).sum(1)
        errors.append(drawn - (-candidates.target_log_kappa()).exp())
    check_zero_on_average(errors)


def test_the_error_is_lower_if_examples_are_near_different_clusters():
    vectors, weights, _ = model()
    hidden = vectors[torch.arange(64) % C] / 3 + 0.1 * torch.randn(64, D, generator=torch.Generator().manual_seed(3))
    target = torch.arange(64) % C
    errors = {}
    for name, sampler in {
        "importance": Importance(weights, 12),
        "clustered": Clustered(weights, 12, group_size=8, clusters=5),
    }.items():
        head = ClassHead(D, C, sampler=sampler, bias=False)
        with torch.no_grad():
            head.weight.copy_(vectors)
        found = diagnose(head, hidden, target, generator=torch.Generator().manual_seed(0))
        errors[name] = found.rmse_log_z
    assert errors["clustered"] < 0.5 * errors["importance"]


def test_a_head_attaches_its_vectors_and_trains():
    _, weights, hidden = model()
    head = ClassHead(D, C, sampler=Clustered(ClassCounts(weights), 12, group_size=4, clusters=5, every=3))
    optimizer = torch.optim.Adagrad(head.parameters(), lr=0.5)
    target = torch.arange(9)
    before = head.exact_loss(hidden, target).item()
    for _ in range(30):
        optimizer.zero_grad()
        head(hidden, target).backward()
        optimizer.step()
    assert head.exact_loss(hidden, target).item() < 0.2 * before
    # The sampler of a copy uses the vectors of the copy; after a resize it uses all vectors.
    twin = copy.deepcopy(head)
    assert twin.sampler.schedule.vectors[0] is twin.weight
    head.resize(C + 7)
    assert head.sampler.num_classes == C + 7
    assert head(hidden, target).isfinite()


def test_the_clusters_are_part_of_the_state():
    vectors, weights, hidden = model()
    one, other = (Clustered(weights, 12, group_size=4, clusters=5, every=10**6) for _ in range(2))
    one.attach(vectors)
    one(torch.arange(9), hidden=hidden)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.clusters.centroids, one.clusters.centroids)
    assert torch.equal(other.clusters.share(torch.arange(C)), one.clusters.share(torch.arange(C)))


def test_shares_of_a_cluster_sum_to_one_and_every_position_finds_its_class():
    vectors, weights, _ = model()
    clusters = Clusters.of(vectors, weights, Clusters.by_id(weights, 5).centroids)
    ids = torch.arange(C)
    cluster, share = clusters.cluster_of(ids), clusters.share(ids)
    totals = torch.zeros(5, dtype=torch.float64).index_add_(0, cluster, share)
    assert torch.allclose(totals, (clusters.mass > 0).double())
    assert torch.allclose(share, weights / clusters.mass[cluster])
    position = torch.linspace(0, 4.999, 500, dtype=torch.float64)
    position = position[clusters.mass[position.long()] > 0]
    found, found_share = clusters.locate(position)
    assert torch.equal(clusters.cluster_of(found), position.long())
    assert torch.allclose(found_share, clusters.share(found))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clustered(torch.ones(5), 6), r"`k` must be in \[1, 5\], got 6"),
        (lambda: Clustered(torch.ones(5), 3, explicit=3), r"`explicit` must be in \[0, 2\], got 3"),
        (lambda: Clustered(torch.ones(5), 3, mix=0.0), r"`mix` must be finite and above 0, got 0.0"),
        (lambda: Clustered(torch.ones(5), 3, group_size=0), r"`group_size` must be at least 1, got 0"),
        (lambda: Clustered(torch.ones(5), 3).attach(torch.ones(4, 2)), r"`weight` must have shape \[5, D\]"),
        (
            lambda: Clustered(ClassCounts(torch.tensor([1.0, 0.0, 1.0]), smoothing=0), 2, explicit=0)(
                torch.tensor([0])
            ),
            r"`weights` must be above 0 for every class that is not explicit, got 0 at position 1",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
