"""Systematic: the order of classes on the line, and stratification, change the variance and nothing else."""

import copy

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.samplers import Learned, Systematic, WithExplicit
from tests import reference

C, D, B = 60, 6, 16
TARGET = torch.arange(B)
ORDERS = {
    "frequency": "frequency",
    "random": "random",
    "cluster": "cluster",
    "given": torch.arange(C).roll(7).flip(0),
}


def weights(seed=0):
    return torch.rand(C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1


def clustered_vectors():
    """Return class vectors around five centres, and the centre of each class, which is independent of its id."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(5, D, generator=generator)
    label = torch.randint(5, (C,), generator=generator)
    return centres[label] + 0.1 * torch.randn(C, D, generator=generator), label


def draw(sampler, seed=0):
    candidates = sampler(TARGET, exclude=TARGET.unsqueeze(1), generator=torch.Generator().manual_seed(seed))
    return candidates.ids(), candidates.log_kappa()


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def line(sampler):
    """Return the ids in their order on the line, without classes that are drawn with probability 1."""
    start, end = sampler.comb.table.interval(torch.arange(C))
    return start.argsort()[(end > start)[start.argsort()]].tolist()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_no_order_changes_the_inclusion_probabilities(order, kernels):
    sampler = Systematic(weights(), 10, order=order)
    sampler.attach(clustered_vectors()[0])
    count = torch.zeros(C)
    for offset in torch.arange(0.0025, 1, 0.005):
        ids, _ = draw_at(sampler, offset)
        count[ids[0]] += 0.005
    pi = torch.tensor(reference.inclusion_probabilities(weights().tolist(), 10))
    torch.testing.assert_close(count, pi, atol=0.01, rtol=0)
    log_kappa = sampler(torch.arange(C)).target_log_kappa()
    torch.testing.assert_close(log_kappa, -pi.double().log(), rtol=1e-6, atol=1e-6)


def draw_at(sampler, offset):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.rand", lambda *size, **_: torch.full(size, float(offset), dtype=torch.float64))
        return draw(sampler)


def test_the_order_by_frequency_puts_the_heaviest_classes_first():
    sampler = Systematic(weights(), 10, order="frequency")
    assert line(sampler) == weights().argsort(descending=True).tolist()


def test_a_given_order_is_kept():
    sampler = Systematic(torch.ones(C), 12, order=ORDERS["given"])
    assert line(sampler) == ORDERS["given"].tolist()
    rest = sampler.without(torch.tensor([5, 40]))
    assert line(rest) == [c for c in ORDERS["given"].tolist() if c not in (5, 40)]
    # A draw takes every fifth class on the line.
    place = torch.empty(C, dtype=torch.int64).scatter_(0, ORDERS["given"], torch.arange(C))
    assert (place[draw(sampler)[0][0]].diff() == 5).all()


def test_random_orders_are_repeatable_and_differ_after_each_refresh():
    one, other = (Systematic(weights(), 10, order="random") for _ in range(2))
    seen = []
    for _ in range(3):
        assert line(one) == line(other)
        seen.append(tuple(line(one)))
        one.refresh()
        other.refresh()
    assert len(set(seen)) == 3
    # A loaded state continues the same sequence of orders.
    fresh = Systematic(weights(), 10, order="random")
    fresh.load_state_dict(one.state_dict())
    assert line(fresh) == line(one)
    fresh.refresh()
    one.refresh()
    assert line(fresh) == line(one)


def test_similar_class_vectors_are_neighbours_once_attached():
    vectors, label = clustered_vectors()
    sampler = Systematic(weights(), 10, order="cluster")
    assert line(sampler) == list(range(C))
    sampler.attach(vectors)
    draw(sampler)
    found = label[line(sampler)]
    assert len(found.unique_consecutive()) == 5


def test_vectors_are_attached_through_an_explicit_set():
    vectors, label = clustered_vectors()
    inner = Systematic(weights(), 10, order="cluster")
    ClassHead(D, C, sampler=WithExplicit(inner, "batch"), weight=torch.nn.Parameter(vectors))
    draw(inner)
    assert len(label[line(inner)].unique_consecutive()) == 5


def test_an_order_by_clusters_lowers_the_error():
    vectors, _ = clustered_vectors()
    hidden, target = vectors[:B] / 4, torch.arange(B)
    errors = []
    for order in (None, "cluster"):
        head = ClassHead(D, C, sampler=Systematic(torch.ones(C), 15, order=order), bias=False)
        with torch.no_grad():
            head.weight.copy_(vectors)
        errors.append(diagnose(head, hidden, target, generator=torch.Generator().manual_seed(0)).rmse_log_z)
    assert errors[1] < 0.5 * errors[0]


def test_only_training_steps_update_the_clusters():
    vectors, label = clustered_vectors()
    sampler = Systematic(weights(), 10, order="cluster")
    sampler.attach(vectors)
    sampler.advance()
    draw(sampler)
    before = line(sampler)
    vectors.copy_(vectors.flip(0))
    for _ in range(5):
        draw(sampler)
    assert line(sampler) == before
    # A training step assigns 64 classes to clusters; by now all are assigned, to centroids of the new vectors.
    for _ in range(2 * -(-C // 64)):
        sampler.advance()
        draw(sampler)
    assert line(sampler) != before
    found = label.flip(0)[line(sampler)]
    assert len(found.unique_consecutive()) == 5


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_order_is_part_of_the_state(order):
    sampler = Systematic(weights(), 10, order=order)
    vectors, _ = clustered_vectors()
    sampler.attach(vectors)
    draw(sampler)
    other = Systematic(weights(seed=3), 10, order=order if isinstance(order, str) else torch.arange(C))
    other.attach(vectors)
    other.load_state_dict(sampler.state_dict())
    for seed in range(6):
        assert same(draw(sampler, seed), draw(other, seed))


def test_the_order_by_id_needs_no_state():
    sampler = Systematic(weights(), 10)
    sampler.attach(clustered_vectors()[0])
    assert len(sampler.state_dict()["line"]) == 0
    assert set(sampler.state_dict()) == {"source.weights.raw", "weights", "line"}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_order_is_resized_with_the_classes(order):
    head = ClassHead(D, C, sampler=Systematic(ClassCounts(torch.ones(C)), 10, order=order))
    hidden = torch.randn(B, D)
    assert head(hidden, TARGET).isfinite()
    for num_classes in (C + 9, C - 9):
        head.resize(num_classes)
        assert head(hidden, TARGET).isfinite()
        assert head.sampler.comb.table.order.sort().values.tolist() == list(range(num_classes))
    if not isinstance(order, str):
        assert head.sampler.comb.table.order.tolist() == [c for c in order.tolist() if c < C - 9]


def test_classes_drawn_beside_an_explicit_set_keep_their_vectors():
    sampler = Systematic(weights(), 10, order="cluster")
    sampler.attach(clustered_vectors()[0])
    explicit = WithExplicit(sampler, torch.tensor([0, 7]))
    ids, _ = draw(explicit)
    assert explicit.sampler.order.vectors == sampler.order.vectors
    assert not torch.isin(ids[:, 2:], torch.tensor([0, 7])).any()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_learned_continues_from_a_loaded_state_in_every_order(order):
    torch.manual_seed(0)
    counts = torch.rand(C) + 0.1
    head, other = (ClassHead(D, C, sampler=Learned(counts, 10, every=3, order=order)) for _ in range(2))
    hidden = torch.randn(B, D)
    for seed in range(7):
        head(hidden, TARGET, generator=torch.Generator().manual_seed(seed))
    other.load_state_dict(head.state_dict())
    for seed in range(7):
        losses = [each(hidden, TARGET, generator=torch.Generator().manual_seed(seed)) for each in (head, other)]
        assert torch.equal(*losses)
    assert torch.equal(head.sampler.comb.table.order, other.sampler.comb.table.order)
    twin = copy.deepcopy(head)
    if order == "cluster":
        assert twin.sampler.order.vectors[0] is twin.weight


def test_stratified_sampling_draws_one_class_from_each_stratum():
    sampler = Systematic(torch.ones(C), 12, stratified=True)
    seen = set()
    for seed in range(300):
        ids = draw(sampler, seed)[0][0]
        assert (ids // 5).tolist() == list(range(12))
        seen.add(tuple((ids % 5).tolist()))
    assert len(seen) == 300


def test_a_class_in_two_strata_can_be_drawn_twice():
    sampler = Systematic(torch.tensor([3.0, 4.0, 3.0]), 2, stratified=True)
    rows = {tuple(sampler(torch.tensor([0])).ids()[0].tolist()) for _ in range(200)}
    assert rows == {(0, 1), (0, 2), (1, 1), (1, 2)}


def test_stratified_sampling_has_the_variance_of_its_formula():
    generator = torch.Generator().manual_seed(1)
    w, z = (torch.rand(500, dtype=torch.float64, generator=generator) + 0.1 for _ in range(2))
    pi = reference.inclusion_probabilities(w.tolist(), 40)
    candidates = Systematic(w, 40, stratified=True, group_size=1)(torch.zeros(6000, dtype=torch.int64))
    sums = (candidates.log_kappa().exp() * z[candidates.ids()]).sum(1)
    expected = reference.stratified_variance(z.tolist(), pi)
    assert sums.var().item() == pytest.approx(expected, rel=0.08)
    assert abs(sums.mean() - z.sum()) < 4 * (expected / len(sums)) ** 0.5


def test_k_can_be_changed(kernels):
    for order in (None, *ORDERS.values()):
        sampler = Systematic(weights(), 10, order=order)
        sampler.set_k(25)
        assert draw(sampler)[0].shape[1] == 25
        if order != "random":
            assert same(draw(sampler), draw(Systematic(weights(), 25, order=order)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Systematic(torch.ones(4), 2, order="size"),
            r"`order` must be one of 'frequency', 'random', 'cluster'",
        ),
        (lambda: Systematic(torch.ones(4), 2, order=torch.arange(3)), r"`order` must have shape \[4\], got \[3\]"),
        (
            lambda: Systematic(torch.ones(4), 2, order=torch.tensor([0, 1, 4, 2])),
            r"`order` must lie in \[0, 4\), got 4 at position 2",
        ),
        (
            lambda: Systematic(torch.ones(4), 2, order=torch.tensor([3, 1, 2, 1])),
            r"`order` must not repeat a class, got 1 at position 3 again",
        ),
        (
            lambda: Systematic(torch.ones(4), 2, order="cluster").attach(torch.ones(3, 2)),
            r"`weight` must have shape \[4, D\], got \[3, 2\]",
        ),
        (
            lambda: Systematic(torch.full((4,), 1e305, dtype=torch.float64), 1, order="frequency"),
            r"`weights` must have a sum between 1e-280 and 1e\+300, got 4e\+305",
        ),
        (lambda: Systematic(torch.ones(4), 2).set_k(5), r"`k` must be in \[1, 4\], got 5"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
