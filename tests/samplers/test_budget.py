"""Budget: k is adjusted until the error of log Z̃ has the wanted value."""

import copy
import logging

import pytest
import torch

from manyclass import ClassCounts, ClassHead, ScorerHead, diagnose
from manyclass.heads import flatten_examples
from manyclass.heads._learning import rmse_log_z
from manyclass.objectives import LogisticRanking
from manyclass.samplers import Bernoulli, Budget, Importance, InBatch, Learned, Systematic

C, D, B = 500, 6, 40


def head_and_batch(sampler, seed=0, **options):
    torch.manual_seed(seed)
    head = ClassHead(D, C, sampler=sampler, **options)
    with torch.no_grad():
        head.weight.copy_(0.7 * torch.randn(C, D))
    return head, torch.randn(B, D), torch.randint(C, (B,))


def train(head, hidden, target, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [head(hidden, target, generator=generator).item() for _ in range(steps)]


@pytest.mark.parametrize("start", [16, 450], ids=["grows", "shrinks"])
@pytest.mark.parametrize("make", [Systematic, Learned, Bernoulli.proportional])
def test_the_error_reaches_the_wanted_value(make, start):
    head, hidden, target = head_and_batch(Budget(make(torch.ones(C), start), 0.2, least=8, every=1))
    train(head, hidden, target, 60)
    found = diagnose(head, hidden, target, draws=40, generator=torch.Generator().manual_seed(2))
    assert found.rmse_log_z == pytest.approx(0.2, rel=0.25)
    assert head.sampler.k % 8 == 0
    assert 64 < head.sampler.k < 350


def test_a_probe_estimates_the_error_without_a_pass_over_all_classes():
    head, _, _ = head_and_batch(Importance(torch.ones(C), 400))
    # A probe takes at most 64 of these examples.
    hidden, target = torch.randn(100, D), torch.randint(C, (100,))
    generator = torch.Generator().manual_seed(0)
    probes = torch.tensor([rmse_log_z(head, flatten_examples(hidden, target, C), seed=seed) for seed in range(60)])
    hidden, target = hidden[::2].contiguous(), target[::2].contiguous()
    expected = diagnose(head, hidden, target, draws=60, generator=generator).rmse_log_z
    assert probes.square().mean().sqrt().item() == pytest.approx(expected, rel=0.1)


def test_ignored_examples_are_not_probed():
    head, hidden, target = head_and_batch(Importance(torch.ones(C), 200))
    hidden[::2], target[::2] = 1e3, -100
    assert rmse_log_z(head, flatten_examples(hidden, target, C), seed=0) != pytest.approx(float("nan"), nan_ok=True)
    ignored = flatten_examples(hidden, torch.full_like(target, -100), C)
    assert rmse_log_z(head, ignored, seed=0) == pytest.approx(float("nan"), nan_ok=True)
    budget = Budget(Importance(torch.ones(C), 200), 0.1)
    budget.adjust(float("nan"))
    assert (budget.k, budget.probes) == (200, [])


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([0.1], 1024),
        ([0.104], 1024),
        ([0.12], 1472),
        ([0.09], 832),
        ([5.0], 2000),
        ([0.001], 512),
        ([0.001] * 9, 64),
        ([5.0, 5.0, 0.1], 2000),
    ],
)
def test_k_changes_with_the_square_of_the_error_within_bounds(errors, expected):
    budget = Budget(Systematic(torch.ones(2000), 1024), 0.1)
    for error in errors:
        budget.adjust(error)
    assert budget.k == expected == budget.sampler.k
    assert budget.probes[-1] == (0, errors[-1], expected)


def test_the_effect_of_a_huge_error_fades_soon():
    budget = Budget(Systematic(torch.ones(2000), 512), 0.1)
    budget.adjust(100.0)
    for _ in range(40):
        budget.adjust(0.1 * (512 / budget.k) ** 0.5)
    assert budget.k == pytest.approx(512, rel=0.15)


def test_k_stays_within_its_bounds():
    budget = Budget(Systematic(torch.ones(2000), 500), 0.1, least=300, most=700)
    budget.adjust(9.0)
    assert budget.k == 700
    for _ in range(30):
        budget.adjust(0.0)
    assert budget.k == 300
    few = Budget(Systematic(torch.ones(10), 5), 0.1)
    few.adjust(0.1)
    assert few.k == 10


def test_probes_run_at_fixed_intervals_and_only_in_training():
    head, hidden, target = head_and_batch(Budget(Systematic(torch.ones(C), 100), 0.1, every=5))
    train(head, hidden, target, 12)
    assert [step for step, _, _ in head.sampler.probes] == [5, 10]
    with torch.no_grad():
        train(head, hidden, target, 12)
    diagnose(head, hidden, target, draws=8)
    head.eval()
    train(head, hidden, target, 12)
    assert len(head.sampler.probes) == 2
    ranking, hidden, target = head_and_batch(
        Budget(Systematic(torch.ones(C), 100), 0.1, every=1), objective=LogisticRanking()
    )
    train(ranking, hidden, target, 3)
    assert ranking.sampler.probes == []


def test_only_the_last_probes_are_kept():
    budget = Budget(Importance(torch.ones(C), 100), 0.1)
    for _ in range(250):
        budget.adjust(0.1)
    assert len(budget.probes) == 100


def test_every_change_of_k_is_logged(caplog):
    budget = Budget(Systematic(torch.ones(2000), 512), 0.1)
    with caplog.at_level(logging.INFO, logger="manyclass"):
        budget.adjust(0.12)
        budget.adjust(0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "k 512 → 736: error of log Z̃ 0.12, wanted 0.1 (step 0)"
    ]


@pytest.mark.parametrize("make", [Systematic, Learned, Importance, Bernoulli])
def test_a_resumed_run_equals_an_uninterrupted_one(make):
    whole, hidden, target = head_and_batch(Budget(make(torch.ones(C), 64), 0.2, least=8, every=3))
    train(whole, hidden, target, 20)
    resumed, _, _ = head_and_batch(Budget(make(torch.ones(C), 200), 0.2, least=8, every=3), seed=5)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.sampler.k == whole.sampler.k != 64
    losses = [train(head, hidden, target, 20, seed=7) for head in (whole, resumed)]
    assert losses[0] == losses[1]
    assert resumed.sampler.k == whole.sampler.k
    assert copy.deepcopy(whole).sampler.k == whole.sampler.k


def test_an_inner_sampler_learns_as_it_does_alone():
    alone, hidden, target = head_and_batch(Learned(torch.ones(C), 100, every=3))
    wrapped, _, _ = head_and_batch(Budget(Learned(torch.ones(C), 100, every=3), 0.1, every=1000))
    losses = [train(head, hidden, target, 10) for head in (alone, wrapped)]
    assert losses[0] == losses[1]
    assert torch.equal(alone.sampler.estimate, wrapped.sampler.sampler.estimate)


def test_class_vectors_are_attached_to_the_inner_sampler():
    head, hidden, target = head_and_batch(Budget(Systematic(torch.ones(C), 100, order="cluster"), 0.1))
    train(head, hidden, target, 1)
    assert head.sampler.sampler.order.vectors[0] is head.weight
    assert head.sampler.sampler.comb.table.order.tolist() != list(range(C))


def test_a_budget_works_in_a_scorer_head_and_can_be_resized():
    items = torch.nn.Embedding(C, D)
    head = ScorerHead(
        lambda hidden, ids: hidden @ items(ids).transpose(1, 2), Budget(Importance(torch.ones(C), 64), 0.1, every=1)
    )
    train(head, torch.randn(B, D), torch.randint(C, (B,)), 4)
    assert len(head.sampler.probes) == 3
    k = head.sampler.k
    budget = Budget(Systematic(ClassCounts(torch.ones(C)), 100), 0.1)
    budget.resize(C + 5)
    assert budget(torch.tensor([C + 4])).num_classes == C + 5
    budget.resize(50)
    assert (budget.k, budget.num_classes) == (50, 50)
    with pytest.raises(ValueError, match="`sampler` must be built from ClassCounts to be resized to 40 classes"):
        head.sampler.resize(40)
    assert (head.sampler.k, head.sampler.num_classes) == (k, C)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Budget(InBatch(torch.ones(5)), 0.1),
            TypeError,
            r"`sampler` must be one whose k can be set, got InBatch",
        ),
        (
            lambda: Budget(Bernoulli.from_probabilities(torch.ones(5)), 0.1),
            ValueError,
            r"`sampler` must have a `k` to change, got a Bernoulli whose k is fixed",
        ),
        (lambda: Budget(Importance(torch.ones(5), 2), 0.0), ValueError, r"`rmse_log_z` must be finite and above 0"),
        (lambda: Budget(Importance(torch.ones(5), 2), 0.1, least=0), ValueError, r"`least` must be at least 1, got 0"),
        (lambda: Budget(Importance(torch.ones(5), 2), 0.1, most=9), ValueError, r"`most` must be at least 64, got 9"),
        (lambda: Budget(Importance(torch.ones(5), 2), 0.1, every=0), ValueError, r"`every` must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
