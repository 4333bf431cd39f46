"""ClassCounts counts, smooths and resizes, and solves for the exponent of b = f^α."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import ClassCounts
from manyclass.samplers import Importance
from tests import reference


def test_counts_come_from_a_tensor_from_targets_and_from_a_stream():
    targets = torch.tensor([[0, 2, 2], [2, 4, 0]])
    expected = [2.0, 0.0, 3.0, 0.0, 1.0]
    streamed = ClassCounts.streaming(5)
    for part in targets:
        streamed.update(part)
    for counts in (ClassCounts(torch.tensor([2, 0, 3, 0, 1])), ClassCounts.from_targets(targets, 5), streamed):
        assert counts.raw.tolist() == expected
        assert counts.num_classes == 5


def test_an_unseen_class_has_the_count_of_smoothing():
    counts = torch.tensor([4, 0, 2])
    assert ClassCounts(counts).weights().tolist() == [4, 1, 2]
    assert ClassCounts(counts, smoothing=0.25).weights().tolist() == [4, 0.25, 2]
    assert ClassCounts(counts, smoothing=0).weights().tolist() == [4, 0, 2]
    assert ClassCounts(counts).weights(0.5).tolist() == [2, 1, 2**0.5]
    assert float(ClassCounts(counts).frequency().sum()) == pytest.approx(1)


def test_the_input_tensor_is_not_modified():
    given_counts = torch.tensor([1.0, 2.0], dtype=torch.float64)
    ClassCounts(given_counts).update(torch.tensor([0]))
    assert given_counts.tolist() == [1, 2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=40).filter(any), st.data())
def test_alpha_lies_between_0_and_1_and_solves_its_equation(counts, data):
    counts = ClassCounts(torch.tensor(counts))
    k = data.draw(st.integers(1, counts.num_classes))
    alpha = counts.alpha(k)
    assert 0 <= alpha <= 1
    assert float((counts.frequency() ** alpha).sum()) == pytest.approx(k, rel=1e-9)
    assert alpha == pytest.approx(
        0 if k == counts.num_classes else reference.exponent(counts.frequency().tolist(), k), abs=1e-9
    )


def test_alpha_is_exactly_0_for_all_classes_and_1_for_one():
    counts = ClassCounts(torch.tensor([5, 1, 7, 2]))
    assert counts.alpha(4) == 0.0
    assert counts.alpha(1) == pytest.approx(1.0, abs=1e-12)


def test_without_smoothing_alpha_may_not_exist():
    counts = ClassCounts(torch.tensor([5, 0, 7, 0]), smoothing=0)
    assert counts.alpha(1) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"`k` must be at most 2, the number of classes that occur, .* got 3"):
        counts.alpha(3)


@pytest.mark.parametrize("seed", range(5))
def test_the_papers_exponent(seed):
    """C = 1000, D = 100, N = 2000, weights and inputs from N(0, 1): K = 20 gives b = f^0.54."""
    generator = torch.Generator().manual_seed(seed)
    weights, inputs = torch.randn(1000, 100, generator=generator), torch.randn(2000, 100, generator=generator)
    # The argmax of scores plus Gumbel noise is a draw from their softmax.
    noise = -torch.empty(2000, 1000).exponential_(generator=generator).log()
    targets = (inputs @ weights.T + noise).argmax(1)
    counts = ClassCounts.from_targets(targets, 1000, smoothing=0)
    assert 0.53 <= counts.alpha(20) <= 0.55


def test_a_refreshed_sampler_uses_new_counts():
    counts = ClassCounts.streaming(3)
    sampler = Importance(counts, 1000)
    counts.update(torch.tensor([2] * 997))
    target, seed = torch.tensor([0]), torch.Generator().manual_seed(0)
    assert (sampler(target, generator=seed).ids() == 2).float().mean() < 0.5
    sampler.refresh()
    assert (sampler(target, generator=seed).ids() == 2).float().mean() > 0.95


def test_counts_can_be_resized():
    counts = ClassCounts(torch.tensor([3, 4]))
    counts.resize(4)
    assert counts.weights().tolist() == [3, 4, 1, 1]
    counts.resize(1)
    assert counts.weights().tolist() == [3]
