"""The fastest way to the exact loss is found by the clock, on a part of the classes and examples if there are many."""

import pytest
import torch

from manyclass.kernels import EXACT_WAYS, exact, exact_cross_entropy, fastest, fastest_way, seconds
from tests.kernels.operands import OWN, C, operands, parameters

pytestmark = pytest.mark.usefixtures("kernels", "runs_of_256_classes")


def test_the_fastest_way_is_measured_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(fastest, "MAX_TIMED_CLASSES", 100)
    given = operands(torch.float32, excluded=3)
    measured = []

    def run(hidden, weight, *, way, **options):
        measured.append((way, len(weight), int(options["target"].max()), int(options["exclude"].max())))
        clock[0] += {"eager": 3.0, "closed_form": 1.0, "chunked": 2.0}[way]
        return exact_cross_entropy(hidden, weight, way=way, **options)

    clock = [0.0]
    monkeypatch.setattr(fastest, "exact_cross_entropy", run)
    monkeypatch.setattr(seconds.time, "perf_counter", lambda: clock[0])
    assert fastest_way(**given) == ("closed_form", C / 100)
    assert {way for way, *_ in measured} == set(OWN)
    # A slow way is measured once.
    assert [way for way, *_ in measured].count("eager") == 1
    assert all(number == 100 and most < 100 for _, number, *ends in measured for most in ends)
    assert all(parameter.grad is None for parameter in parameters(given))
    # If the scores are too many to keep, ways that keep them are not tried.
    monkeypatch.setattr(exact, "MAX_KEPT_SCORES", {"cpu": 1})
    assert fastest_way(**given) == ("chunked", 2 * C / 100)


def test_a_way_that_fails_is_not_the_fastest(monkeypatch):
    def fail(*operands, **options):
        raise AssertionError("no such GPU")

    monkeypatch.setitem(exact._WAYS, "closed_form", fail)
    monkeypatch.setitem(exact._WAYS, "chunked", fail)
    assert fastest_way(**operands(excluded=1))[0] == "eager"


@pytest.mark.parametrize(("factor", "expected"), [(0.9, "closed_form"), (0.5, "chunked")])
def test_on_the_cpu_a_small_difference_of_speed_does_not_choose_the_way(monkeypatch, factor, expected):
    clock, run = [0.0], exact_cross_entropy

    def timed(*arguments, way, **options):
        clock[0] += {"closed_form": 1.0, "chunked": factor}.get(way, 2.0)
        return run(*arguments, way=way, **options)

    monkeypatch.setattr(fastest, "exact_cross_entropy", timed)
    monkeypatch.setattr(seconds.time, "perf_counter", lambda: clock[0])
    assert fastest_way(**operands())[0] == expected


def test_a_large_batch_is_timed_on_some_of_its_examples(monkeypatch):
    timed, tried = [], []

    def run(hidden, weight, **operands):
        timed.append(len(hidden))
        tried.append(operands["way"])
        return exact_cross_entropy(hidden, weight, **operands)

    monkeypatch.setattr(fastest, "MIN_TIMED_EXAMPLES", 100)
    monkeypatch.setattr(fastest, "MAX_TIMED_SCORES", 20 * 130)
    monkeypatch.setattr(fastest, "exact_cross_entropy", run)
    target = torch.zeros(300, dtype=torch.int64)
    way, seconds = fastest_way(torch.randn(300, 4), torch.randn(20, 4), target=target)
    assert set(timed) == {130}
    assert not set(tried) & set(fastest.SLOW_ON_CPU)
    assert way in EXACT_WAYS
    assert seconds > 0
