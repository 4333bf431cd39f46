"""The probe of the error of log Z̃: its schedule, its pool, its warning and its state."""

import math

import pytest

from manyclass.samplers import ErrorProbe, affordable_interval


def due_steps(probe, steps, interval, square=0.01):
    found = []
    for step in range(1, steps + 1):
        if probe.count_step():
            probe.record(square, interval=interval)
            found.append(step)
    return found


def test_intervals_double_from_the_first_steps_until_probes_are_affordable():
    assert due_steps(ErrorProbe(), 100, interval=20) == [4, 8, 16, 32, 52, 72, 92]
    assert due_steps(ErrorProbe(), 9, interval=1) == [4, 5, 6, 7, 8, 9]
    assert due_steps(ErrorProbe(every=7), 22, interval=1) == [7, 14, 21]


def test_the_first_probe_awaits_steps_that_pay_for_it():
    probe = ErrorProbe()
    while not probe.count_step() or probe.postpones(1000):
        pass
    assert probe.steps == 100
    probe.record(0.01, interval=1000)
    assert probe.next_step == 200
    # Later probes, and those of a given interval, are taken as they come.
    assert not probe.postpones(10**6)
    assert not ErrorProbe(every=3).postpones(10**6)


def test_an_affordable_probe_scores_at_most_a_hundredth_of_the_classes_between_two():
    interval = affordable_interval(50_000, 512, 1024)
    assert 64 * 50_000 <= 0.01 * interval * 3 * 512 * 1024 < 64 * 50_000 + 0.01 * 3 * 512 * 1024


def test_the_error_pools_the_last_eight_probes():
    probe = ErrorProbe(every=1)
    assert probe.error is None
    for square in [100.0, *[0.04] * 7, 0.16]:
        probe.count_step()
        probe.record(square, interval=1)
    assert probe.pooled == 8
    assert probe.error == pytest.approx(math.sqrt((7 * 0.04 + 0.16) / 8))
    probe.record(math.nan, interval=1)
    assert (probe.number, probe.error) == (10, pytest.approx(math.sqrt((7 * 0.04 + 0.16) / 8)))
    probe.restart_pool()
    assert (probe.number, probe.error, probe.pooled) == (10, None, 0)


def test_the_pooled_error_of_huge_squares_is_finite():
    probe = ErrorProbe(every=1)
    for _ in range(8):
        probe.record(1.6e308, interval=1)
    assert probe.error == pytest.approx(math.sqrt(1.6e308))


def test_it_warns_once_and_not_of_a_single_probe():
    probe = ErrorProbe(every=1)
    warned = []
    for square in [9.0, 0.0, 0.0, 0.0, 0.0, *[1.0] * 9]:
        probe.record(square, interval=1)
        warned.append(probe.should_warn())
    # The pooled error is above 0.5 with the fourth probe.
    assert warned == [False, False, False, True, *[False] * 10]


def test_a_probe_continues_from_its_state():
    probe, other = ErrorProbe(), ErrorProbe()
    due_steps(probe, 37, interval=11)
    other.load_state(probe.state())
    assert other.error == probe.error
    assert due_steps(other, 40, interval=11) == due_steps(probe, 40, interval=11)
    assert other.state() == probe.state()


@pytest.mark.parametrize(
    ("place", "value"), [(0, -1.0), (0, math.inf), (1, 0.0), (2, 2.0**53), (5, -0.5), (5, math.nan), (5, math.inf)]
)
def test_a_damaged_state_is_refused(place, value):
    probe = ErrorProbe()
    due_steps(probe, 10, interval=3)
    state = probe.state()
    state[place] = value
    with pytest.raises(ValueError, match="`state` must hold"):
        ErrorProbe().load_state(state)
    with pytest.raises(ValueError, match="12 numbers, got 11"):
        ErrorProbe().load_state(probe.state()[1:])
