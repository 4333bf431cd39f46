"""Budget: k doubles while the error of log Z̃ is too high, and halves while it is needlessly low."""

import copy
import logging

import pytest
import torch

from manyclass import ClassCounts, ClassHead, ScorerHead, diagnose
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


def probed(budget, errors):
    """Return the k of each of these training steps, in which a probe finds an error."""
    found = []
    for error in errors:
        budget.advance()
        found.append(budget.k)
        budget.probe.count_step()
        budget.probe.record(error**2, interval=1)
    budget.advance()
    return [*found, budget.k]


@pytest.mark.parametrize("start", [16, 450], ids=["grows", "shrinks"])
@pytest.mark.parametrize("make", [Systematic, Learned, Bernoulli.proportional])
def test_the_error_reaches_the_wanted_range(make, start):
    head, hidden, target = head_and_batch(Budget(make(torch.ones(C), start), 0.2, least=8, every=1))
    train(head, hidden, target, 60)
    found = diagnose(head, hidden, target, draws=40, generator=torch.Generator().manual_seed(2))
    # k doubles above 4/3 of the wanted error and halves below 7/15, by the pooled error of single draws.
    assert 7 / 15 * 0.2 * 0.8 < found.rmse_log_z < 4 / 3 * 0.2 * 1.2
    assert head.sampler.k != start
    assert 16 < head.sampler.k < 450


@pytest.mark.parametrize(
    ("error", "expected"),
    [(0.15, 512), (0.199, 512), (0.201, 1024), (9.0, 1024), (0.071, 512), (0.069, 256), (0.0, 256)],
)
def test_k_doubles_above_four_thirds_of_the_wanted_error_and_halves_below_seven_fifteenths(error, expected):
    budget = Budget(Systematic(torch.ones(2000), 512))
    assert budget.rmse_log_z == 0.15
    assert probed(budget, [error] * 8)[-1] == expected == budget.sampler.k
    assert len(budget.decisions) == (expected != 512)


def test_the_wanted_error_sets_the_bounds():
    assert [probed(Budget(Systematic(torch.ones(2000), 512), 0.3), [x] * 8)[-1] for x in (0.41, 0.3, 0.13)] == [
        1024,
        512,
        256,
    ]


@pytest.mark.parametrize(("error", "factor"), [(1.0, 2), (0.0, 0.5)])
def test_k_changes_at_most_once_in_eight_probes(error, factor):
    budget = Budget(Systematic(torch.ones(5000), 512))
    expected = [512] * 8 + [int(512 * factor)] * 8 + [int(512 * factor**2)] * 8 + [int(512 * factor**3)]
    assert probed(budget, [error] * 24) == expected


def test_the_mean_square_over_eight_probes_decides():
    # The mean square of one error of 0.6 and seven of 0 is 0.212².
    assert probed(Budget(Systematic(torch.ones(2000), 512)), [0.6, *[0.0] * 7])[-1] == 1024
    assert probed(Budget(Systematic(torch.ones(2000), 512)), [0.5, *[0.0] * 7])[-1] == 512
    # Eight probes without a change: the next one replaces the first.
    assert probed(Budget(Systematic(torch.ones(2000), 512)), [0.1] * 8 + [0.6])[8:] == [512, 1024]


def test_k_stays_within_its_bounds():
    budget = Budget(Systematic(torch.ones(2000), 500), 0.1, least=300, most=700)
    assert probed(budget, [9.0] * 24)[-1] == 700
    assert probed(budget, [0.0] * 48)[-1] == 300
    # The default bounds are 64 and C.
    assert probed(Budget(Systematic(torch.ones(2000), 500), 0.1), [9.0] * 32)[-1] == 2000
    assert probed(Budget(Systematic(torch.ones(2000), 500), 0.1), [0.0] * 48)[-1] == 64
    assert probed(Budget(Systematic(torch.ones(10), 5), 0.1), [0.0] * 8)[-1] == 10


def test_probes_run_at_fixed_intervals_and_only_in_training():
    head, hidden, target = head_and_batch(Budget(Systematic(torch.ones(C), 100), 0.1, every=5))
    assert head.probe is head.sampler.probe
    train(head, hidden, target, 12)
    assert (head.probe.steps, head.probe.number) == (12, 2)
    with torch.no_grad():
        train(head, hidden, target, 12)
    diagnose(head, hidden, target, draws=8)
    head.eval()
    train(head, hidden, target, 12)
    assert (head.probe.steps, head.probe.number) == (12, 2)


def test_k_does_not_change_with_an_objective_without_a_z():
    head, hidden, target = head_and_batch(
        Budget(Systematic(torch.ones(C), 100), 1e-3, every=1), objective=LogisticRanking()
    )
    train(head, hidden, target, 20)
    assert (head.sampler.k, head.sampler.decisions, head.probe.error) == (100, [], None)


def test_batches_of_ignored_examples_do_not_change_k():
    head, hidden, target = head_and_batch(Budget(Systematic(torch.ones(C), 100), 1e-3, every=1))
    train(head, hidden, torch.full_like(target, -100), 20)
    assert (head.sampler.k, head.probe.error) == (100, None)
    train(head, hidden, target, 9)
    assert head.sampler.k == 200


def test_every_change_of_k_is_logged(caplog):
    budget = Budget(Systematic(torch.ones(2000), 512))
    with caplog.at_level(logging.INFO, logger="manyclass"):
        probed(budget, [0.1] * 8 + [0.9] * 8)
    assert [record.getMessage() for record in caplog.records] == budget.decisions
    # The first of the large errors brings the pooled error to 0.33.
    assert budget.decisions == ["step 9: the error of log Z̃ is 0.33 with k = 512, wanted 0.15; now k = 1,024"]


@pytest.mark.parametrize("make", [Systematic, Learned, Importance, Bernoulli])
def test_a_resumed_run_equals_an_uninterrupted_one(make):
    whole, hidden, target = head_and_batch(Budget(make(torch.ones(C), 64), 0.1, least=8, every=1))
    train(whole, hidden, target, 13)
    resumed, _, _ = head_and_batch(Budget(make(torch.ones(C), 200), 0.1, least=8, every=1), seed=5)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.sampler.k == whole.sampler.k == 128
    losses = [train(head, hidden, target, 20, seed=7) for head in (whole, resumed)]
    assert losses[0] == losses[1]
    assert resumed.sampler.k == whole.sampler.k > 128
    assert resumed.sampler.decisions == whole.sampler.decisions[1:]
    assert resumed.probe.state() == whole.probe.state()
    assert copy.deepcopy(whole).sampler.k == whole.sampler.k


@pytest.mark.parametrize(
    ("place", "value"), [(0, 0.0), (0, C + 1.0), (0, torch.inf), (0, torch.nan), (1, -1.0), (5, -0.5), (6, torch.inf)]
)
def test_a_damaged_state_is_refused(place, value):
    budget = Budget(Systematic(torch.ones(C), 100))
    probed(budget, [0.1] * 3)
    state = budget.state_dict()
    state["progress"] = state["progress"].clone()
    state["progress"][place] = value
    with pytest.raises(RuntimeError, match="While loading Budget"):
        Budget(Systematic(torch.ones(C), 100)).load_state_dict(state)


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
        lambda hidden, ids: hidden @ items(ids).transpose(1, 2), Budget(Importance(torch.ones(C), 64), 1e-3, every=1)
    )
    train(head, torch.randn(B, D), torch.randint(C, (B,)), 9)
    assert (head.probe.number, head.sampler.k) == (9, 128)
    budget = Budget(Systematic(ClassCounts(torch.ones(C)), 100), 0.1)
    budget.resize(C + 5)
    assert budget(torch.tensor([C + 4])).num_classes == C + 5
    budget.resize(50)
    assert (budget.k, budget.num_classes) == (50, 50)
    with pytest.raises(ValueError, match="`sampler` must be built from ClassCounts to be resized to 40 classes"):
        head.sampler.resize(40)
    assert (head.sampler.k, head.sampler.num_classes) == (128, C)


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
