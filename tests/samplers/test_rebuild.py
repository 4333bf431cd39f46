"""A background rebuild is taken up at the same step however long it takes, and survives saving and copying."""

import copy
import io
import os
import pickle
import threading
import time

import pytest
import torch

from manyclass import ClassHead
from manyclass.samplers import Clustered, Learned, Tailored
from manyclass.samplers._rebuild import BackgroundRebuild, lag

C, D, B, EVERY = 60, 5, 12, 8
WEIGHTS = 1 / torch.arange(1, C + 1, dtype=torch.float64)

SAMPLERS = {
    "clustered": lambda: Clustered(WEIGHTS, 12, group_size=3, every=EVERY),
    "learned": lambda: Learned(WEIGHTS, 12, every=EVERY),
    "learned, heaviest first": lambda: Learned(WEIGHTS, 12, every=EVERY, order="frequency"),
    "tailored": lambda: Tailored(WEIGHTS, 12, group_size=3, rank=3, every=EVERY),
}


class Built:
    device = torch.device("cpu")

    def __init__(self, value):
        self.value = value

    def to(self, device):
        return self


def run(schedule, current, steps, *, every=EVERY, seconds=0.0):
    """Return the last module and the value after each step; the value of a build is the step of its snapshot."""

    def snapshot():
        snapshot_step = schedule.steps

        def build():
            time.sleep(seconds)
            return Built(snapshot_step)

        return build

    values = []
    for _ in range(steps):
        current = schedule.advance(current, every, snapshot)
        values.append(current.value)
    return current, values


@pytest.mark.parametrize(("every", "expected_lag"), [(8, 2), (5, 2), (2, 1), (1, 1)])
def test_a_build_is_taken_up_a_fixed_number_of_steps_after_its_snapshot(every, expected_lag):
    assert lag(every) == expected_lag
    _, values = run(BackgroundRebuild(), Built(0), 40, every=every)
    assert values == [max(0, (step - expected_lag) // every * every) for step in range(1, 41)]


def test_the_speed_of_the_thread_changes_nothing():
    assert run(BackgroundRebuild(), Built(0), 20)[1] == run(BackgroundRebuild(), Built(0), 20, seconds=0.05)[1]


def test_steps_do_not_wait_for_a_build_before_it_is_due():
    schedule, current, go = BackgroundRebuild(), Built(0), threading.Event()

    def build():
        go.wait()
        return Built(1)

    for _ in range(EVERY + lag(EVERY) - 1):
        current = schedule.advance(current, EVERY, lambda: build)
    assert current.value == 0
    go.set()
    assert schedule.advance(current, EVERY, lambda: build).value == 1


def test_an_error_is_raised_when_its_build_is_due_and_later_builds_work():
    schedule, current = BackgroundRebuild(), Built(0)

    def build():
        raise ValueError("no table")

    for _ in range(EVERY + 1):
        current = schedule.advance(current, EVERY, lambda: build)
    with pytest.raises(ValueError, match="no table"):
        schedule.advance(current, EVERY, lambda: build)
    assert run(schedule, current, EVERY)[1][-1] == 2 * EVERY


def test_a_dropped_build_is_not_taken_up():
    schedule = BackgroundRebuild()
    current, _ = run(schedule, Built(0), EVERY)
    schedule.drop()
    assert run(schedule, current, 5)[1] == [0] * 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("steps", [3, EVERY, EVERY + 1, EVERY + 2])
def test_a_copy_takes_up_the_build_in_progress(steps, copied):
    schedule = BackgroundRebuild()
    current, _ = run(schedule, Built(0), steps, seconds=0.05)
    # A copy holds the finished build, and a copy of a copy must keep it.
    twin, again = copied(schedule), copied(copied(schedule))
    values = run(schedule, copy.deepcopy(current), 10)[1]
    assert run(twin, copy.deepcopy(current), 10)[1] == values
    assert run(again, copy.deepcopy(current), 10)[1] == values


def head_and_batch(name, seed=0):
    torch.manual_seed(seed)
    head = ClassHead(D, C, sampler=SAMPLERS[name]())
    generator = torch.Generator().manual_seed(3)
    return head, torch.randn(B, D, generator=generator), torch.randint(C, (B,), generator=generator)


def train(head, hidden, target, steps):
    """Return the losses of training steps, with the step as the seed of its draw."""
    losses = []
    for step in steps:
        head.zero_grad()
        loss = head(hidden, target, generator=torch.Generator().manual_seed(step))
        loss.backward()
        with torch.no_grad():
            for parameter in head.parameters():
                parameter -= 0.5 * parameter.grad
        losses.append(loss.item())
    return losses


def rebuilt(head):
    """Return the object that the sampler draws from."""
    if isinstance(head.sampler, Learned):
        return head.sampler.comb
    return head.sampler.clusters if isinstance(head.sampler, Clustered) else head.sampler.sketch


def loaded(head, name):
    """Return another head with the state of this one, saved and loaded with `weights_only=True`."""
    file = io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other, _, _ = head_and_batch(name, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("stop", [1, EVERY - 1, EVERY, EVERY + 1, EVERY + 2, EVERY + 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, stop):
    head, hidden, target = head_and_batch(name)
    whole = train(head, hidden, target, range(3 * EVERY))
    head, hidden, target = head_and_batch(name)
    first = train(head, hidden, target, range(stop))
    copies = [
        loaded(head, name),
        copy.deepcopy(head),
        pickle.loads(pickle.dumps(head)),
        loaded(loaded(head, name), name),
    ]
    for each in (*copies, head):
        assert first + train(each, hidden, target, range(stop, 3 * EVERY)) == whole


def test_a_build_uses_the_vectors_of_its_snapshot():
    head, hidden, target = head_and_batch("clustered")
    train(head, hidden, target, range(EVERY))
    later = copy.deepcopy(head)
    with torch.no_grad():
        later.weight.neg_()
    train(head, hidden, target, range(lag(EVERY)))
    train(later, hidden, target, range(lag(EVERY)))
    assert torch.equal(rebuilt(head).centroids, rebuilt(later).centroids)


@pytest.mark.parametrize("order", [None, "frequency"])
def test_a_rebuild_of_learned_gives_the_table_of_a_refresh(order):
    sampler = Learned(WEIGHTS, 12, every=EVERY, order=order)
    head, hidden, target = head_and_batch("learned")
    head.use(sampler)
    # The snapshot is made before the draw of its step.
    train(head, hidden, target, range(EVERY - 1))
    refreshed = copy.deepcopy(sampler)
    refreshed.refresh()
    train(head, hidden, target, range(1 + lag(EVERY)))
    draws = [each(target, generator=torch.Generator().manual_seed(0)) for each in (sampler, refreshed)]
    assert torch.equal(draws[0].ids(), draws[1].ids())
    assert torch.equal(draws[0].log_kappa(), draws[1].log_kappa())


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_refresh_discards_the_build_in_progress(name):
    head, hidden, target = head_and_batch(name)
    train(head, hidden, target, range(EVERY))
    head.sampler.refresh()
    refreshed_module = rebuilt(head)
    train(head, hidden, target, range(lag(EVERY)))
    assert rebuilt(head) is refreshed_module
    train(head, hidden, target, range(EVERY))
    assert rebuilt(head) is not refreshed_module


# Python warns that a process with threads is forked: users do, for example with a DataLoader.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_builds_what_its_parent_was_building():
    schedule, slow = BackgroundRebuild(), 0.2
    run(schedule, Built(0), EVERY, seconds=slow)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(schedule.pending().value).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 100) == str(EVERY).encode()
    os.close(read)
