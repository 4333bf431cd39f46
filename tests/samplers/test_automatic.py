"""Automatic takes the cheapest design whose error is small, and looks again as training goes on."""

import logging
import math

import pytest
import safetensors.torch
import torch

from manyclass import ClassCounts, ClassHead, ScorerHead
from manyclass.candidates import Candidates
from manyclass.kernels import EXACT_WAYS
from manyclass.samplers import Automatic, Costs, Exhaustive, Learned, Observation, StepClock, Tailored

C = 20_000


def seconds(exact=40.0, shared=4.0, tailored=12.0, per_class=1 / 512):
    """Return costs of a step, in any unit."""
    return Costs(exact, shared, tailored, per_class)


class Steps:
    """Training steps with given errors and times, without a head."""

    def __init__(self, sampler, errors, costs):
        self.sampler, self.errors, self.costs = sampler, errors, costs
        self.timed, self.tried = [], []

    def error(self, sampler):
        if isinstance(sampler, Exhaustive):
            return 0.0
        # The error of each design at k = 1,024, and the powers of k that it falls with.
        name, power = ("shared", 0.5) if isinstance(sampler, Learned) else ("tailored", 1.0)
        return self.errors[name] * (1024 / sampler.k) ** power

    def seconds(self, sampler):
        self.timed.append(type(sampler).__name__)
        name = "shared" if isinstance(sampler, Learned) else "tailored"
        return self.costs.of(name, sampler.k - 1024)

    def trial(self, sampler, seed):
        self.tried.append(type(sampler).__name__)
        return self.error(sampler) ** 2

    def exact(self):
        self.timed.append("exact")
        return "closed_form", self.costs.exact

    @property
    def clock(self):
        return StepClock(torch.device("cpu"), self.seconds, self.exact)

    def run(self, probes):
        """Take steps, each with a probe."""
        for _ in range(probes):
            self.sampler.advance()
            candidates = self.sampler.draw(
                torch.zeros(1, dtype=torch.int64), torch.empty(1, 0, dtype=torch.int64), hidden=None, generator=None
            )
            assert isinstance(candidates, Candidates)
            self.sampler.probe.count_step()
            self.sampler.probe.record(self.error(self.sampler.live) ** 2, interval=1)
            k = candidates.blocks[0].ids.shape[1]
            self.sampler.observe(
                Observation(candidates, torch.randn(1, 3), lambda k=k: torch.rand(k) / k, self.trial, self.clock)
            )
        self.sampler.advance()
        return self.sampler


def train(errors, costs=None, probes=9, **options):
    sampler = Automatic(torch.ones(C), **options)
    steps = Steps(sampler, {"shared": errors[0], "tailored": errors[1]}, costs or seconds())
    return steps.run(probes), steps


def test_exact_is_taken_at_once_and_for_good_where_it_is_cheapest():
    sampler, steps = train((0.3, 0.3), seconds(exact=3.0), probes=40)
    assert (sampler.design, sampler.k, sampler.exact.way) == ("exact", C, "closed_form")
    assert len(sampler.decisions) == 1
    assert steps.timed == ["exact", "Learned", "Learned"]
    assert steps.tried == []


def test_a_small_error_keeps_the_shared_design():
    sampler, _ = train((0.1, 0.05), probes=60)
    assert (sampler.design, sampler.k, sampler.decisions) == ("shared", 1024, [])


@pytest.mark.parametrize(
    ("errors", "costs", "expected"),
    [
        # Twice the classes would do, and cost less than a design for the batch.
        ((0.21, 0.05), seconds(), ("shared", 2048)),
        # Twice the classes would not do.
        ((0.9, 0.05), seconds(), ("tailored", 1024)),
        # The tailored design needs more classes to be accurate enough, and is still cheaper than exact.
        ((0.9, 0.5), seconds(), ("tailored", 4096)),
        ((0.9, 0.5), seconds(exact=15.0), ("exact", C)),
        ((0.9, 0.05), seconds(exact=11.0), ("exact", C)),
        # Nothing but all classes is accurate enough.
        ((5.0, 5.0), seconds(), ("exact", C)),
    ],
)
def test_a_large_error_leads_to_the_cheapest_design_that_is_accurate_enough(errors, costs, expected):
    sampler, _ = train(errors, costs)
    assert (sampler.design, sampler.k) == expected
    assert len(sampler.decisions) == 1


def test_k_doubles_at_most_once_in_eight_probes_and_stops_when_the_error_is_small():
    sampler = Automatic(torch.ones(C))
    steps = Steps(sampler, {"shared": 0.39, "tailored": 0.9}, seconds(tailored=100.0, exact=100.0))
    # 0.39, 0.28 and 0.195: the last is not above 0.2.
    assert [steps.run(8).k for _ in range(5)] == [2048, 4096, 4096, 4096, 4096]


def test_a_needlessly_small_error_leads_back_to_a_cheaper_design():
    sampler, steps = train((0.9, 0.1))
    assert (sampler.design, sampler.k) == ("tailored", 1024)
    steps.errors.update(shared=0.08, tailored=0.01)
    steps.run(16)
    assert (sampler.design, sampler.k) == ("shared", 1024)
    steps.errors.update(shared=0.9, tailored=0.25)
    steps.run(9)
    assert (sampler.design, sampler.k) == ("tailored", 2048)
    steps.errors.update(tailored=0.1)
    steps.run(32)
    assert (sampler.design, sampler.k) == ("tailored", 1024)


def test_exact_is_left_again_when_a_cheaper_design_is_accurate():
    sampler, steps = train((5.0, 5.0))
    assert sampler.design == "exact"
    steps.errors.update(shared=0.09, tailored=0.05)
    steps.run(16)
    assert (sampler.design, sampler.k) == ("shared", 1024)


def test_each_rise_doubles_the_probes_that_a_fall_awaits():
    sampler, steps = train((5.0, 5.0), probes=2)
    waited = []
    for _ in range(4):
        assert sampler.design == "exact"
        steps.errors.update(shared=0.09, tailored=0.05)
        probes = 0
        while sampler.design == "exact":
            steps.run(1)
            probes += 1
        waited.append(probes)
        steps.errors.update(shared=5.0, tailored=5.0)
        steps.run(2)
    assert waited == [16, 32, 64, 128]
    twin = Automatic(torch.ones(C))
    twin.load_state_dict(sampler.state_dict())
    other = Steps(twin, {"shared": 0.09, "tailored": 0.05}, seconds())
    assert other.run(8 << 5 >> 1).design == "exact"
    assert other.run(8 << 5 >> 1).design == "shared"


def test_a_very_large_error_is_not_waited_for():
    assert train((1.0, 0.05), probes=2)[0].design == "tailored"
    sampler, steps = train((0.3, 0.05), probes=5)
    assert sampler.design == "shared"
    # Not even in the eight probes after a decision.
    steps.errors.update(shared=0.21)
    steps.run(4)
    assert (sampler.design, sampler.k) == ("shared", 2048)
    steps.errors.update(shared=3.0)
    steps.run(2)
    assert (sampler.design, sampler.k) == ("tailored", 1024)


def test_the_chosen_error_sets_the_bounds():
    assert train((0.16, 0.04), rmse_log_z=0.05)[0].design == "tailored"
    assert train((0.3, 0.04), rmse_log_z=0.5)[0].design == "shared"


def test_every_decision_is_logged_with_what_was_measured(caplog):
    with caplog.at_level(logging.INFO, logger="manyclass"):
        sampler, _ = train((0.9, 0.05), seconds(0.040, 0.004, 0.012, 1e-6))
    assert [record.getMessage() for record in caplog.records] == sampler.decisions
    assert sampler.decisions == [
        "step 2: the error of log Z̃ is 0 with all classes (40 ms), 0.9 with the shared design, k = 1,024 (4 ms), "
        "0.05 with the tailored design, k = 1,024 (12 ms); from now on the tailored design, k = 1,024"
    ]


def test_the_first_probe_of_a_design_does_not_count():
    # In a compiled graph it still measures the design before.
    sampler, steps = train((5.0, 0.05), probes=2)
    assert sampler.design == "tailored"
    steps.errors["tailored"] = 0.1
    sampler.probe.record(25.0, interval=1)
    steps.run(30)
    assert (sampler.design, sampler.k) == ("tailored", 1024)
    assert len(sampler.decisions) == 1


def test_all_ranks_take_the_exact_way_of_the_first(monkeypatch):
    first = torch.tensor([EXACT_WAYS.index("chunked")])
    monkeypatch.setattr("manyclass._ranks.from_ranks", lambda *own: [(first,) if len(own) == 1 else own, own])
    assert train((0.3, 0.3), seconds(exact=3.0), probes=1)[0].exact.way == "chunked"


def test_given_costs_are_not_measured():
    sampler, steps = train((0.9, 0.05), probes=9, costs=None)
    assert steps.timed == ["exact", "Learned", "Learned", "Tailored"]
    given = Automatic(torch.ones(C), costs=sampler.costs)
    other = Steps(given, {"shared": 0.9, "tailored": 0.05}, seconds(exact=1.0))
    assert (other.run(9).design, other.timed) == ("tailored", [])


@pytest.mark.parametrize(
    ("costs", "error", "message"),
    [
        ({"exact": 1.0}, TypeError, "`costs` must be a Costs, got dict"),
        (Costs(exact=1.0), ValueError, r"`costs\.shared` must be finite and above 0, got nan"),
        (seconds(exact=-1.0), ValueError, r"`costs\.exact` must be finite and above 0, got -1\.0"),
        (seconds(per_class=math.nan), ValueError, r"`costs\.per_class` must be finite and at least 0, got nan"),
    ],
)
def test_incomplete_costs_are_refused(costs, error, message):
    with pytest.raises(error, match=message):
        Automatic(torch.ones(C), costs=costs)


def test_costs_without_a_tailored_design_are_enough():
    assert math.isnan(Automatic(torch.ones(C), costs=seconds(tailored=math.nan, per_class=0.0)).costs.tailored)


def test_a_measurement_changes_no_draw(monkeypatch):
    monkeypatch.setattr("manyclass.heads._learning.step_seconds", lambda *arguments: 4.0)
    monkeypatch.setattr("manyclass.heads._learning.exact_seconds", lambda *arguments: (None, 40.0))
    losses = []
    for costs in (None, seconds()):
        torch.manual_seed(0)
        head = ClassHead(8, 3000, sampler=Automatic(torch.arange(1.0, 3001.0), costs=costs))
        losses.append([head(torch.randn(32, 8), torch.randint(3000, (32,))).item() for _ in range(6)])
    assert losses[0] == losses[1]


def test_given_costs_decide_at_once_too():
    sampler = Automatic(torch.ones(C), costs=seconds(exact=1.0))
    assert Steps(sampler, {"shared": 0.1, "tailored": 0.1}, seconds()).run(1).design == "exact"
    assert len(sampler.decisions) == 1


def test_a_restored_sampler_takes_the_same_decisions_with_the_same_costs():
    sampler, steps = train((0.3, 0.1), probes=5)
    twin = Automatic(torch.ones(C))
    twin.load_state_dict(sampler.state_dict())
    other = Steps(twin, steps.errors, seconds(exact=1.0, shared=50.0))
    for _ in range(4):
        steps.run(6)
        other.run(6)
        assert (twin.design, twin.k) == (sampler.design, sampler.k)
        assert torch.equal(twin.progress, sampler.progress)
    assert twin.design == "tailored"
    assert other.timed == ["Tailored"]


def test_a_decision_that_waits_for_the_next_step_is_restored_too():
    sampler = Automatic(torch.ones(C), costs=seconds())
    steps = Steps(sampler, {"shared": 0.9, "tailored": 0.05}, seconds())
    steps.run(1)
    advance, sampler.advance = sampler.advance, lambda: None
    steps.run(1)
    assert (sampler.design, len(sampler.decisions)) == ("shared", 1)
    twin = Automatic(torch.ones(C))
    twin.load_state_dict(sampler.state_dict())
    twin.advance()
    assert twin.design == "tailored"
    advance()
    assert sampler.design == "tailored"


@pytest.mark.parametrize(("place", "value"), [(0, 3.0), (1, 0.0), (2, 1e9), (4, math.inf), (9, 6.0), (11, math.nan)])
def test_a_damaged_state_is_refused(place, value):
    state = Automatic(torch.ones(C)).state_dict()
    state["progress"] = state["progress"].clone()
    state["progress"][place] = value
    with pytest.raises(RuntimeError, match="While loading Automatic"):
        Automatic(torch.ones(C)).load_state_dict(state)


def test_few_classes_are_refused():
    with pytest.raises(ValueError, match="`num_classes` must be at least 1025, got 1000"):
        Automatic(torch.ones(1000))


def test_a_resized_sampler_measures_again():
    sampler, _ = train((0.15, 0.05))
    assert sampler.probe.pooled == 8
    sampler.resize(3000)
    assert sampler.probe.pooled == 0
    assert (sampler.num_classes, sampler.exact.num_classes) == (3000, 3000)
    assert math.isnan(sampler.costs.exact)


def test_a_resized_sampler_keeps_its_design_and_k_and_measures_them():
    for errors, expected in (((0.25, 0.9), ("shared", 4096)), ((0.9, 0.05), ("tailored", 1024))):
        sampler, steps = train(errors, seconds(tailored=30.0) if expected[0] == "shared" else seconds())
        assert (sampler.design, sampler.k) == (expected[0], min(2048, expected[1]))
        sampler._set_k(*expected)
        sampler.resize(10_000)
        steps.run(1)
        assert (sampler.design, sampler.k) == expected
        assert (sampler.costs.shared, sampler.costs.per_class) == (4.0, 1 / 512)
        assert math.isnan(sampler.costs.tailored) == (expected[0] == "shared")


@pytest.mark.parametrize("exact", [-1.0, math.inf])
def test_costs_that_a_state_cannot_hold_are_refused(exact):
    with pytest.raises(ValueError, match=rf"`costs\.exact` must be finite and above 0, got {exact}"):
        Automatic(torch.ones(C), costs=seconds(exact=exact))


def test_a_resized_head_draws_no_more_classes_than_there_are_and_again_at_least_the_least():
    torch.manual_seed(0)
    head = ClassHead(8, 3000, counts=torch.ones(3000))
    for num_classes, expected in ((600, 600), (2500, 1024)):
        head(torch.randn(64, 8), torch.randint(600, (64,))).backward()
        head.resize(num_classes)
        assert head.sampler.num_classes == num_classes
        assert [part.k for part in (head.sampler.shared, head.sampler.tailored)] == [expected] * 2
        for _ in range(5):
            head(torch.randn(64, 8), torch.randint(num_classes, (64,))).backward()
        assert head.sampler.costs.exact > 0


def test_a_needlessly_small_error_at_the_least_k_changes_nothing():
    # With fewer classes than twice the least, half of them would be too few.
    sampler = Automatic(torch.ones(1500))
    steps = Steps(sampler, {"shared": 0.01, "tailored": 0.01}, seconds())
    assert (steps.run(30).design, sampler.k, sampler.decisions) == ("shared", 1024, [])
    # No design is cheaper than the shared one at the least k, so none is tried.
    assert steps.tried == []


def test_a_design_that_was_left_is_tried_with_the_present_hidden_vectors():
    sampler = Automatic(torch.ones(C), costs=Costs(40.0, 4.0, 12.0, 0.0))
    sampler.attach(torch.randn(C, 3))
    steps = Steps(sampler, {"shared": 0.9, "tailored": 0.05}, seconds())
    # Between two steps that the tailored design learns from by itself.
    assert steps.run(9 + 13).design == "tailored"
    sampler.tailored.moment.zero_()
    sampler.design = "exact"
    steps.run(16)
    assert "Tailored" in steps.tried
    assert sampler.tailored.moment.any()


def test_the_least_k_sets_the_start_and_the_number_of_examples_that_share_a_draw():
    sampler = Automatic(torch.ones(200), least=10, every=3)
    assert (sampler.k, sampler.shared.group_size, sampler.tailored.group_size) == (10, 5, 5)
    assert sampler.probe.every == 3
    sampler = Automatic(torch.ones(C))
    assert (sampler.k, sampler.shared.group_size, sampler.tailored.group_size) == (1024, 512, 512)
    with pytest.raises(ValueError, match="`num_classes` must be at least 11, got 10"):
        Automatic(torch.ones(10), least=10)
    with pytest.raises(ValueError, match="`least` must be at least 1, got 0"):
        Automatic(torch.ones(10), least=0)


def test_its_designs_share_the_counts_but_their_state_shares_no_memory():
    sampler = Automatic(ClassCounts.streaming(2000))
    assert sampler.shared.counts is sampler.tailored.source.weights
    sampler.shared.counts.update(torch.zeros(5, dtype=torch.int64))
    state = safetensors.torch.load(safetensors.torch.save(sampler.state_dict()))
    other = Automatic(ClassCounts.streaming(2000))
    other.load_state_dict(state)
    assert other.tailored.source.weights.raw[0] == other.shared.counts.raw[0] == 5


def test_it_trains_a_head_and_a_scorer():
    torch.manual_seed(0)
    heads = [
        ClassHead(8, 2000, counts=torch.ones(2000)),
        ScorerHead(lambda hidden, ids: hidden @ rows[ids].transpose(1, 2), Automatic(torch.ones(2000))),
    ]
    rows = torch.nn.Parameter(torch.randn(2000, 8))
    for head in heads:
        for _ in range(12):
            head(torch.randn(64, 8), torch.randint(2000, (64,))).backward()
        assert head.sampler.costs.exact > 0
        assert head.probe is head.sampler.probe
        assert head.probe.number > 0


def test_designs_are_the_three_samplers():
    sampler = Automatic(torch.ones(C))
    kinds = [type(part) for part in (sampler.exact, sampler.shared, sampler.tailored)]
    assert kinds == [Exhaustive, Learned, Tailored]


@pytest.mark.parametrize("given", [False, True], ids=["measured", "given costs"])
def test_where_all_classes_are_cheapest_a_training_is_the_exact_one_from_its_first_step(monkeypatch, given):
    monkeypatch.setattr("manyclass.heads._learning.exact_seconds", lambda head, examples: ("closed_form", 1.0))
    monkeypatch.setattr("manyclass.heads._learning.step_seconds", lambda head, examples, draw: 2.0)
    samplers = (Automatic(torch.ones(2000), costs=seconds(exact=1.0) if given else None), Exhaustive(2000))
    weights = []
    for sampler in samplers:
        torch.manual_seed(0)
        head = ClassHead(8, 2000, counts=torch.ones(2000), sampler=sampler)
        optimizer = torch.optim.Adagrad(head.parameters(), 0.2)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            hidden, target = torch.randn(16, 8, generator=generator), torch.randint(2000, (16,), generator=generator)
            optimizer.zero_grad()
            head(hidden, target).backward()
            optimizer.step()
        weights.append(head.weight.detach())
    assert torch.equal(*weights)
    assert [line.partition(":")[0] for line in samplers[0].decisions] == ["step 1"]
