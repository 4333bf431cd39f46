"""Metrics of ranks."""

import math

import pytest
import torch

from manyclass.tasks.metrics import metric_of_ranks


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("HR@10", 0.5),
        ("HR@20", 0.75),
        ("MRR", (1 + 1 / 10 + 1 / 11 + 1 / 21) / 4),
        ("MRR@20", (1 + 1 / 10 + 1 / 11) / 4),
        ("NDCG@10", (1 + 1 / math.log2(11)) / 4),
    ],
)
def test_ranks_give_the_metrics(name, mean):
    rank = torch.tensor([1.0, 10.0, 11.0, 21.0], dtype=torch.float64)
    assert float(metric_of_ranks(name)(rank).mean()) == pytest.approx(mean)
