"""A probe measures the error of log Z̃ and changes nothing: a training does not depend on which probes it records."""

import copy
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import nn

from manyclass import ClassCounts, ClassHead, ScorerHead, diagnose
from manyclass.errors import InaccurateWarning
from manyclass.optim import RowAdagrad
from manyclass.samplers import Automatic, Budget, Clustered, Costs, Learned, Systematic, Tailored
from manyclass.training import Training
from tests.training.problems import Recorder

C, D, B, K, STEPS = 2100, 8, 32, 40, 60
# With the costs given, decisions depend on the errors alone.
COSTS = Costs(exact=1.0, shared=0.1, tailored=0.2, per_class=1e-4)

SAMPLERS = {
    "pinned": lambda counts: None,
    "default, which decides": lambda counts: Automatic(counts, costs=COSTS),
    "default with k=auto": lambda counts: Budget(Learned(counts, K, order="cluster"), 0.05, least=K, every=7),
    "systematic": lambda counts: Systematic(counts, K, order="cluster"),
    "learned": lambda counts: Learned(counts, K, every=8, order="frequency"),
    "clustered": lambda counts: Clustered(counts, K, group_size=8, every=8),
    "tailored": lambda counts: Tailored(counts, K, group_size=8, rank=4, every=8),
}


def make_head(name):
    torch.manual_seed(0)
    counts = ClassCounts(1 / torch.arange(1, C + 1, dtype=torch.float64))
    sampler = SAMPLERS[name](counts)
    head = ClassHead(D, C, counts=counts, sampler=sampler, k=K if sampler is None else None, sparse=True)
    if isinstance(sampler, Automatic):
        # Distributions so sharp that 1,024 classes drawn by counts are not enough.
        torch.nn.init.normal_(head.weight, std=4.0)
    return head


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(B, D, generator=generator), torch.randint(C, (B,), generator=generator)) for _ in range(STEPS)]


def make_training(name, **options):
    head = make_head(name)
    optimizer = RowAdagrad(head.parameters(), 0.1)
    return head, optimizer, Training(head, batches(), optimizer, steps=STEPS, **options)


def probed(history):
    return [record.step for record in history.records if record.rmse_log_z is not None]


def decided(history):
    return [(record.step, record.decision) for record in history.records if record.decision is not None]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_training_does_not_depend_on_its_probes(name):
    states, decisions = [], []
    for every in (None, 0, 1, 7):
        head, _, training = make_training(name, probe_every=every)
        decisions.append(decided(training.run()))
        states.append({key: value.clone() for key, value in head.state_dict().items()})
    for state in states[1:]:
        assert all(torch.equal(state[key], value) for key, value in states[0].items())
    assert len(decisions[0]) == (name in ("default, which decides", "default with k=auto"))
    assert all(other == decisions[0] for other in decisions[1:])


def test_the_records_hold_the_probes_of_the_head_separate_ones_or_none():
    found = {}
    for every in (None, 0, 25):
        head, _, training = make_training("pinned", probe_every=every)
        history = training.run()
        found[every] = probed(history)
        assert head.extra_probes == []
        if every is None:
            assert history.records[-1].step == STEPS
            assert [r.rmse_log_z for r in history.records if r.rmse_log_z is not None][-1] == head.probe.error
    # The head doubles the intervals, from the first steps on.
    assert found == {None: [4, 8, 16, 32], 0: [], 25: [25, 50]}


def test_a_decision_is_recorded_in_its_step():
    head, _, training = make_training("default, which decides")
    history = training.run()
    # Two probes are enough for an error that is far too high.
    assert decided(history) == [(8, head.sampler.decisions[0])]
    assert history.records[-1].step == STEPS
    assert head.sampler.design == "tailored"
    assert "all classes (1,000 ms)" in head.sampler.decisions[0]


@pytest.mark.parametrize(("name", "warnings"), [("default, which decides", 0), ("pinned", 1)])
def test_an_error_that_the_default_mends_is_not_warned_about(name, warnings):
    head, _, training = make_training(name)
    torch.nn.init.normal_(head.weight, std=4.0)
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        history = training.run()
    assert max(record.rmse_log_z or 0.0 for record in history.records) > 0.5
    assert [warning.category for warning in caught] == [InaccurateWarning] * warnings


def test_a_second_training_does_not_record_what_the_first_one_found():
    head, optimizer, training = make_training("default, which decides")
    training.run()
    history = Training(head, batches(), optimizer, steps=3, report_every=1).run()
    assert (probed(history), decided(history)) == ([], [])


@pytest.mark.parametrize("every", [None, 0, 7])
@pytest.mark.parametrize("after", [7, 8, 9, 33])
def test_a_resumed_training_takes_the_same_decisions(every, after):
    whole, _, training = make_training("default, which decides", probe_every=every)
    expected = training.run()
    left = make_training("default, which decides", probe_every=every, callbacks=[Recorder(interrupt_after=after)])
    assert left[-1].run().stopped == "interrupted"
    resumed = make_training("default, which decides", probe_every=every)
    for part, source in zip(resumed, left, strict=True):
        part.load_state_dict(source.state_dict())
    history = resumed[-1].run()
    assert decided(history) == decided(expected) != []
    errors = [[(r.step, r.loss, r.rmse_log_z) for r in found.records] for found in (history, expected)]
    assert errors[0] == errors[1]
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in resumed[0].state_dict().items())


@pytest.mark.parametrize("before", [None, 0, 7])
@pytest.mark.parametrize("after", [None, 0, 7])
def test_a_training_resumed_with_other_recorded_probes_takes_the_same_decisions(before, after):
    expected = make_training("default, which decides")[-1].run()
    left = make_training("default, which decides", probe_every=before, callbacks=[Recorder(interrupt_after=9)])
    assert left[-1].run().stopped == "interrupted"
    resumed = make_training("default, which decides", probe_every=after)
    for part, source in zip(resumed, left, strict=True):
        part.load_state_dict(source.state_dict())
    assert decided(resumed[-1].run()) == decided(expected) != []


@pytest.mark.parametrize("name", SAMPLERS)
def test_diagnose_changes_neither_the_sampler_nor_the_global_generator(name):
    head = make_head(name)
    hidden, target = batches()[0]
    head(hidden, target).backward()
    before, random = copy.deepcopy(head.state_dict()), torch.get_rng_state()
    first, second = (diagnose(head, hidden, target, draws=3) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())


def test_a_budget_measures_with_a_separate_generator():
    runs = []
    for every in (3, 10**6):
        head = make_head("default with k=auto")
        # Bounds that keep k, so that only the measurement itself could make a difference.
        head.use(Budget(Systematic(torch.ones(C), K), 0.1, least=K, most=K, every=every))
        torch.manual_seed(5)
        runs.append([head(*batch).item() for batch in batches()[:12]])
    assert runs[0] == runs[1]


class WithDropout(nn.Module):
    """A scorer that draws from torch's global RNG."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(3000, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden, ids):
        return hidden @ self.dropout(self.items(ids)).transpose(1, 2)


def deciding(head, *, steps, probe_every):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(64, 4, generator=generator), torch.randint(3000, (64,), generator=generator)) for _ in range(8)
    ]
    optimizer = torch.optim.SGD(head.parameters(), 0.5)
    return Training(head, batches, optimizer, steps=steps, probe_every=probe_every)


def automatic():
    return Automatic(torch.ones(3000), every=2, costs=Costs(40.0, 4.0, 12.0, 1e-3))


def test_a_scorer_with_dropout_trains_the_same_with_any_probes():
    found = []
    for probe_every in (0, 3):
        torch.manual_seed(0)
        head = ScorerHead(WithDropout(), automatic())
        deciding(head, steps=12, probe_every=probe_every).run()
        found.append(head.scorer.items.weight)
    assert torch.equal(*found)


@pytest.mark.parametrize("before", [None, 0, 3])
@pytest.mark.parametrize("after", [None, 0, 3])
def test_a_training_resumed_with_other_probes_takes_the_same_decisions(before, after):
    def make(steps, probe_every):
        torch.manual_seed(0)
        head = ClassHead(4, 3000, sampler=automatic())
        with torch.no_grad():
            head.weight.mul_(12)
        return head, deciding(head, steps=steps, probe_every=probe_every)

    whole, training = make(16, None)
    training.run()
    assert len(whole.sampler.decisions) == 1
    # Between the first probe and the second, which calls for the decision.
    first, training = make(3, before)
    training.run()
    second, resumed = make(16, after)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(training.state_dict())
    resumed.run()
    assert second.sampler.decisions == whole.sampler.decisions
    assert torch.equal(second.weight, whole.weight)


def test_a_separate_probe_forgets_the_design_before_a_decision():
    torch.manual_seed(0)
    head = ClassHead(4, 3000, sampler=Automatic(torch.ones(3000), every=2, costs=Costs(1.5, 1.0, 100.0, 1.0)))
    with torch.no_grad():
        head.weight.mul_(12)
    history = deciding(head, steps=8, probe_every=1).run()
    errors = [record.rmse_log_z for record in history.records if record.rmse_log_z is not None]
    assert head.sampler.design == "exact"
    # The second probe, in step 4, calls for the decision.
    assert min(errors[:4]) > 0
    assert errors[4:] == [0.0] * 4
