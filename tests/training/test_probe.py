"""A probe measures the error of log Z̃ and changes nothing: a training does not depend on how often it is probed."""

import copy

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.optim import RowAdagrad
from manyclass.samplers import Budget, Clustered, Learned, Systematic, Tailored
from manyclass.training import Probe, Training

C, D, B, K, STEPS = 400, 8, 32, 40, 60

SAMPLERS = {
    "default": lambda counts: None,
    "default with k=auto": lambda counts: Budget(Learned(counts, K, order="cluster"), 0.1, every=7),
    "systematic": lambda counts: Systematic(counts, K, order="cluster"),
    "learned": lambda counts: Learned(counts, K, every=8, order="frequency"),
    "clustered": lambda counts: Clustered(counts, K, group_size=8, every=8),
    "tailored": lambda counts: Tailored(counts, K, group_size=8, rank=4, every=8),
}


def make_head(name):
    torch.manual_seed(0)
    counts = ClassCounts(1 / torch.arange(1, C + 1, dtype=torch.float64))
    sampler = SAMPLERS[name](counts)
    return ClassHead(D, C, counts=counts, sampler=sampler, k=K if sampler is None else None, sparse=True)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(B, D, generator=generator), torch.randint(C, (B,), generator=generator)) for _ in range(STEPS)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_training_does_not_depend_on_its_probes(name):
    states = []
    for every in (None, 1, 7):
        head = make_head(name)
        probe = None if every is None else Probe(every=every)
        Training(head, batches(), RowAdagrad(head.parameters(), 0.1), steps=STEPS, probe=probe).run()
        states.append({key: value.clone() for key, value in head.state_dict().items()})
    for state in states[1:]:
        assert all(torch.equal(state[key], value) for key, value in states[0].items())


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
