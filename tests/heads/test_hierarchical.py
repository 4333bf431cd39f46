"""HierarchicalHead: a tree of binary decisions gives probabilities that sum to 1."""

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyclass import ClassCounts, HierarchicalHead
from manyclass.heads._huffman import canonical, code_lengths


def huffman_cost(weights):
    """Return Σ weight × depth of an optimal tree, which is the sum of the weights of its inner nodes."""
    heap = list(weights)
    heapq.heapify(heap)
    cost = 0.0
    while len(heap) > 1:
        node = heapq.heappop(heap) + heapq.heappop(heap)
        cost += node
        heapq.heappush(heap, node)
    return cost


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=60))
def test_code_lengths_are_optimal(weights):
    weights = torch.tensor(weights, dtype=torch.float64)
    length = code_lengths(weights)
    assert float((weights * length).sum()) == pytest.approx(huffman_cost(weights.tolist()))
    assert float((0.5 ** length.double()).sum()) == 1.0


def test_extreme_weights_do_not_overflow_the_code():
    length = code_lengths(torch.tensor([2.0**n for n in range(200)], dtype=torch.float64))
    assert int(length.max()) <= 62
    canonical(length)


def test_equal_weights_give_a_balanced_tree():
    for classes in (2, 3, 8, 100, 1000):
        length = code_lengths(torch.ones(classes))
        assert int(length.max() - length.min()) <= 1


@pytest.mark.parametrize("counted", [False, True], ids=["balanced", "Huffman"])
@pytest.mark.parametrize("classes", [*range(2, 40), 64, 65, 333, 1000])
def test_probabilities_sum_to_one(classes, counted):
    torch.manual_seed(classes)
    counts = torch.randint(0, 1000, (classes,)) if counted else None
    if counted:
        counts[0] += 1
    head = HierarchicalHead(5, classes, counts=counts, dtype=torch.float64)
    torch.nn.init.normal_(head.bias)
    hidden = 3 * torch.randn(4, 5, dtype=torch.float64)
    p = head.log_prob(hidden, torch.arange(classes)).exp()
    assert (p.sum(1) - 1).abs().max() < 1e-10
    assert (p > 0).all()
    best = head.topk(hidden, min(classes, 9))
    torch.testing.assert_close(best.log_prob.exp(), p.topk(min(classes, 9), 1).values, rtol=0, atol=1e-12)
    torch.testing.assert_close(p.gather(1, best.ids), best.log_prob.exp(), rtol=0, atol=1e-12)


def test_a_path_is_as_long_as_the_code():
    counts = ClassCounts(torch.tensor([100, 50, 20, 5, 5, 5, 1]))
    head = HierarchicalHead(3, 7, counts=counts)
    _, _, on_path = head._paths(torch.arange(7))
    assert on_path.sum(1).tolist() == code_lengths(counts.weights()).tolist()
    nodes = head._paths(torch.arange(7))[0]
    assert nodes.unique().tolist() == list(range(6))


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    head = HierarchicalHead(3, 11, counts=torch.arange(11), dtype=torch.float64)
    target = torch.tensor([0, 5, 10, 5])

    def loss(hidden, weight, bias):
        return torch.func.functional_call(head, {"weight": weight, "bias": bias}, (hidden, target))

    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (hidden, head.weight, head.bias))


def test_sequences_weights_and_ignored_targets_are_supported():
    torch.manual_seed(0)
    head = HierarchicalHead(3, 11)
    hidden, target = torch.randn(2, 5, 3), torch.randint(0, 11, (2, 5))
    log_p = head.log_prob(hidden, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(head(hidden, target, reduction="none"), -log_p)
    target[0, 1] = -100
    weight = torch.rand(2, 5)
    kept = target != -100
    expected = -(log_p * weight)[kept].sum() / weight[kept].sum()
    torch.testing.assert_close(head(hidden, target, weight=weight), expected)


def test_a_sparse_gradient_holds_only_the_nodes_on_the_path():
    head = HierarchicalHead(3, 1000, sparse=True)
    head(torch.randn(2, 3), torch.tensor([17, 900])).backward()
    assert head.weight.grad.is_sparse
    assert head.weight.grad.coalesce().indices().shape[1] <= 20


def test_the_tree_is_part_of_the_state():
    head = HierarchicalHead(3, 50, counts=torch.arange(50))
    other = HierarchicalHead(3, 50)
    other.load_state_dict(head.state_dict())
    hidden, ids = torch.randn(2, 3), torch.arange(50)
    torch.testing.assert_close(other.log_prob(hidden, ids), head.log_prob(hidden, ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:2], r"`_length` must have shape \[7\], got \[2\]"),
        (lambda x: x - 10, r"`_length` must lie in \[1, 62\], got -"),
        (lambda x: x + 2**40, r"`_length` must lie in \[1, 62\], got "),
        (lambda x: x + 1, "`_length` must be the depths of all leaves of a binary tree"),
    ],
)
def test_lengths_that_are_not_those_of_a_tree_are_refused(change, message):
    state = HierarchicalHead(3, 7).state_dict()
    state["_length"] = change(state["_length"])
    with pytest.raises(ValueError, match=message):
        HierarchicalHead(3, 7).load_state_dict(state)
