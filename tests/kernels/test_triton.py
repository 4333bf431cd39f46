"""Triton's kernels against the eager code beside them; tests/test_gpu.py runs them compiled."""

import math

import pytest
import torch

from manyclass.samplers import _scan

pytestmark = [
    pytest.mark.usefixtures("all_kernels"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
]


def expected_largest(query, rows, bias, group_size):
    scores = query @ rows.T if bias is None else query @ rows.T + bias
    return torch.stack([group.amax(0) for group in scores.log_softmax(1).split(group_size)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("examples", "classes", "rank", "group_size"),
    [(1, 2, 1, 1), (5, 7, 3, 2), (70, 300, 20, 64), (130, 129, 65, 130), (64, 128, 64, 32)],
)
def test_a_scan_finds_the_largest_probability_in_each_group(examples, classes, rank, group_size, bias):
    generator = torch.Generator().manual_seed(0)
    query, rows = (torch.randn(n, rank, generator=generator) for n in (examples, classes))
    bias = 5 * torch.randn(classes, generator=generator) if bias else None
    found, nearest = _scan.largest_log_p(query, rows, bias, 0, group_size)
    torch.testing.assert_close(found, expected_largest(query, rows, bias, group_size), rtol=0.0, atol=2e-5)
    assert nearest.shape == (examples, 0)


def test_a_class_of_bias_minus_infinity_has_no_probability():
    query, rows, bias = torch.randn(9, 4), torch.randn(300, 4), torch.zeros(300)
    bias[3], bias[128:256] = -math.inf, -math.inf
    found, _ = _scan.largest_log_p(query, rows, bias, 0, 4)
    torch.testing.assert_close(found, expected_largest(query, rows, bias, 4), rtol=0.0, atol=2e-5)
    assert found[:, 3].isneginf().all()


@pytest.mark.parametrize("part", ["query", "rows"])
def test_nan_never_looks_like_a_probability(part):
    given = {"query": torch.randn(6, 4), "rows": torch.randn(50, 4)}
    given[part][0, 0] = math.nan
    found, _ = _scan.largest_log_p(given["query"], given["rows"], None, 0, 3)
    likelihood = found.double().exp().nan_to_num(nan=0.0, posinf=0.0)
    assert ((likelihood >= 0) & (likelihood <= 1)).all()
