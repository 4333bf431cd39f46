"""Z̃ is unbiased, and the interval of log Z̃ covers log Z as often as promised."""

import math

import pytest
import torch

from manyclass import ClassHead
from manyclass.inference import estimate_log_z
from manyclass.samplers import Clustered, Exhaustive, Importance, InBatch, Learned, Systematic, WithExplicit
from tests.inference.model import C, D, frequencies, trained


def seed(value=0):
    return torch.Generator().manual_seed(value)


def best(head, hidden, n):
    return head.topk(hidden, n).ids


SAMPLERS = {
    "systematic": lambda w: Systematic(w, 300),
    "by cluster": lambda w: Systematic(w, 300, order="cluster"),
    "stratified": lambda w: Systematic(w, 300, stratified=True),
    "learned": lambda w: Learned(w, 300),
    "clustered": lambda w: Clustered(w, 300),
    "importance": lambda w: Importance(w, 300),
    "importance, each example": lambda w: Importance(w, 300, group_size=1),
    "with explicit classes": lambda w: WithExplicit(Systematic(w, 300), torch.arange(20)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_interval_covers_log_z_as_often_as_promised(name):
    head, hidden = trained(sampler=SAMPLERS[name](frequencies()), rows=64)
    truth, explicit, generator = head.log_z(hidden).detach(), best(head, hidden, 100), seed()
    held = []
    for _ in range(30):
        found = estimate_log_z(head, hidden, explicit=explicit, generator=generator)
        held.append(((found.log_z - truth).abs() <= found.error).double().mean())
    # `Clustered` draws mostly near the explicit classes, and few of the others.
    assert (0.85 if name == "clustered" else 0.90) <= torch.stack(held).mean() <= 0.99


@pytest.mark.parametrize("draws", [4, 16])
def test_the_coverage_holds_for_any_number_of_draws(draws):
    head, hidden = trained(rows=64)
    truth, explicit, generator = head.log_z(hidden).detach(), best(head, hidden, 100), seed()
    held = []
    for _ in range(30):
        found = estimate_log_z(head, hidden, explicit=explicit, draws=draws, generator=generator)
        held.append(((found.log_z - truth).abs() <= found.error).double().mean())
    assert 0.90 <= torch.stack(held).mean() <= 0.99


def test_z_is_unbiased():
    head, hidden = trained(rows=16, dtype=torch.float64)
    truth, explicit = head.log_z(hidden).detach(), best(head, hidden, 20)
    found = estimate_log_z(head, hidden, explicit=explicit, draws=2000, generator=seed())
    # The limit is wider than the 95 % interval, because all of 16 examples must be within it.
    assert ((found.log_z - truth).abs() <= 1.8 * found.error).all()
    assert (found.error < 0.05).all()


def test_more_draws_and_explicit_classes_make_the_interval_narrower():
    head, hidden = trained(rows=64)
    explicit = best(head, hidden, 100)
    few = estimate_log_z(head, hidden, explicit=explicit, draws=16, generator=seed()).error
    many = estimate_log_z(head, hidden, explicit=explicit, draws=16 * 16, generator=seed()).error
    no_explicit = estimate_log_z(head, hidden, draws=16, generator=seed()).error
    assert 0.15 < float((many / few).median()) < 0.35
    assert float((few / no_explicit).median()) < 0.8


def test_an_exhaustive_sampler_leaves_no_error():
    head, hidden = trained(300, 8, sampler=Exhaustive(300), rows=9)
    found = estimate_log_z(head, hidden, explicit=best(head, hidden, 5))
    torch.testing.assert_close(found.log_z, head.log_z(hidden).detach())
    assert (found.error < 1e-6).all()


def test_with_all_classes_explicit_the_error_is_zero():
    head, hidden = trained(60, 8, k=10, rows=5)
    found = estimate_log_z(head, hidden, explicit=torch.arange(60).expand(5, -1))
    torch.testing.assert_close(found.log_z, head.log_z(hidden).detach())
    assert (found.error == 0).all()


def test_a_repeated_explicit_class_counts_once():
    head, hidden = trained(300, 8, sampler=Exhaustive(300), rows=3)
    explicit = torch.tensor([[4, 4, -1], [7, 2, 7], [-1, -1, -1]])
    torch.testing.assert_close(
        estimate_log_z(head, hidden, explicit=explicit).log_z, head.log_z(hidden).detach(), rtol=0, atol=1e-5
    )


def test_scores_far_from_zero_neither_overflow_nor_vanish():
    head, hidden = trained(300, 8, k=60, rows=4)
    with torch.no_grad():
        head.bias += 5000
    found = estimate_log_z(head, hidden, explicit=best(head, hidden, 50))
    assert found.log_z.isfinite().all()
    assert (found.error < 1).all()
    torch.testing.assert_close(found.log_z, head.log_z(hidden).detach(), rtol=0, atol=1.0)


def test_a_seed_gives_the_same_estimate_in_any_shape():
    head, hidden = trained(rows=6)
    explicit = best(head, hidden, 10)
    flat = estimate_log_z(head, hidden, explicit=explicit, generator=seed())
    shaped = estimate_log_z(
        head, hidden.reshape(2, 3, D), explicit=explicit.reshape(2, 3, 10), draws=8, generator=seed()
    )
    assert shaped.log_z.shape == shaped.error.shape == (2, 3)
    assert torch.equal(flat.log_z, shaped.log_z.reshape(-1))
    assert torch.equal(flat.error, shaped.error.reshape(-1))


def test_any_number_of_examples_is_estimated_in_chunks():
    head, hidden = trained(300, 8, k=60, rows=700)
    found = estimate_log_z(head, hidden, explicit=best(head, hidden, 50), generator=seed())
    assert float((found.log_z - head.log_z(hidden).detach()).abs().median()) < 0.05
    assert estimate_log_z(head, hidden[:0]).log_z.shape == (0,)


def test_an_estimate_changes_neither_head_nor_sampler():
    sampler = Learned(frequencies(), 100, order="cluster")
    head, hidden = trained(sampler=sampler, rows=8)
    before = {
        name: value.clone() for name, value in head.state_dict().items() if "order" not in name and "line" not in name
    }
    found = estimate_log_z(head, hidden)
    assert sampler.training
    assert not found.log_z.requires_grad
    after = head.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_another_sampler_can_draw_more_classes():
    head, hidden = trained(k=50, rows=64)
    explicit = best(head, hidden, 20)
    few = estimate_log_z(head, hidden, explicit=explicit, generator=seed()).error
    many = estimate_log_z(
        head, hidden, explicit=explicit, sampler=Systematic(frequencies(), 1000), generator=seed()
    ).error
    assert float((many / few).median()) < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 3}, r"`draws` must be at least 4, got 3"),
        ({"sampler": Systematic(torch.ones(7), 2)}, r"`sampler` must draw from 3000 classes, got 7"),
        ({"sampler": InBatch(torch.ones(C))}, r"`sampler` must have Z̃ = Z on average, got InBatch, which has not"),
        ({"explicit": torch.zeros(3, 2, dtype=torch.int64)}, r"`explicit` must have shape \[4, 'E'\], got \[3, 2\]"),
        ({"explicit": torch.full((4, 2), C)}, r"`explicit` must lie in \[0, 3000\) \(or be -1, a pad\), got 3000"),
    ],
)
def test_invalid_options_are_refused(options, message):
    head, hidden = trained(rows=4)
    with pytest.raises(ValueError, match=message):
        estimate_log_z(head, hidden, **options)


def test_hidden_must_be_as_long_as_class_vectors():
    with pytest.raises(ValueError, match=r"`hidden` must have shape \[..., 4\], got \[2, 5\]"):
        estimate_log_z(ClassHead(4, 50), torch.randn(2, 5))


def test_the_error_uses_students_t():
    """Two values of Z̃, five times each, give an error that is computed by hand."""

    class Coin(Exhaustive):
        """All classes, with κ = 1 and κ = 3 in turn."""

        turn = 0

        def draw(self, target, exclude, *, hidden, generator):
            candidates = super().draw(target, exclude, hidden=hidden, generator=generator)
            candidates.blocks[0].log_kappa[:] = math.log(1 + 2 * (self.turn % 2))
            self.turn += 1
            return candidates

    head = ClassHead(4, 10, sampler=Coin(10), dtype=torch.float64)
    hidden = torch.randn(3, 4, dtype=torch.float64, generator=seed())
    found = estimate_log_z(head, hidden, draws=10)
    torch.testing.assert_close(found.log_z, head.log_z(hidden).detach() + math.log(2))
    # The standard deviation is √(10/9), t(9) = 2.262157, and the mean is 2.
    torch.testing.assert_close(found.error, torch.full((3,), 2.2621572 * math.sqrt(10 / 9 / 10) / 2).double())
