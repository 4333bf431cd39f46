"""ScorerHead: the losses of ClassHead for any scoring function."""

import pytest
import torch
from torch import nn

from manyclass import ClassHead, ScorerHead
from manyclass.heads import exact
from manyclass.samplers import Exhaustive, Importance, InBatch, WithExplicit
from tests.tables import OBJECTIVES, SAMPLERS

C, D, B = 23, 6, 10


class TwoTowers(nn.Module):
    """A scorer with class vectors from a small network on features of the classes."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.features = nn.Buffer(torch.randn(C, 4, dtype=torch.float64, generator=generator))
        self.tower = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, D)).double()
        self.encoded = []

    def forward(self, hidden, ids):
        self.encoded.append(ids.numel())
        return hidden @ self.tower(self.features[ids]).transpose(1, 2)


def data():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, D, dtype=torch.float64, generator=generator)
    return hidden, torch.randint(0, C, (B,), generator=generator)


def twins(sampler, objective=None):
    """Return a scorer head, a linear head with the class vectors that the scorer computes, and these vectors."""
    scorer = TwoTowers()
    head = ScorerHead(scorer, sampler, objective=objective)
    table = scorer.tower(scorer.features)
    linear = ClassHead(D, C, sampler=sampler, objective=objective, bias=False, weight=nn.Parameter(table.detach()))
    return head, linear, table


@pytest.mark.parametrize("group_size", [None, 1, 3])
# Without class vectors, Clustered draws other classes.
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "clustered"])
def test_a_scorer_head_equals_a_linear_head_with_the_same_vectors(name, group_size):
    head, linear, table = twins(SAMPLERS[name](torch.rand(C) + 0.1, 5, group_size))
    # A training step of one head would change the sampler that both share.
    head.eval(), linear.eval()
    hidden, target = data()
    exclude = torch.randint(-1, C, (B, 2))
    losses = [h(hidden, target, exclude=exclude, generator=torch.Generator().manual_seed(2)) for h in (head, linear)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    (through,) = torch.autograd.grad(losses[1], linear.weight)
    expected = torch.autograd.grad(table, list(head.scorer.parameters()), through)
    for ours, other in zip(torch.autograd.grad(losses[0], list(head.scorer.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_works_with_a_scorer(name):
    head, linear, _ = twins(Importance(torch.ones(C), 7), OBJECTIVES[name][0])
    hidden, target = data()
    losses = [h(hidden, target, generator=torch.Generator().manual_seed(2)) for h in (head, linear)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)


def test_shared_candidates_are_encoded_once():
    head, _, _ = twins(Importance(torch.ones(C), 7))
    head(*data())
    assert sorted(head.scorer.encoded) == [7, B]


@pytest.mark.parametrize("k", [0, 5])
def test_targets_of_the_batch_are_encoded_once(k):
    head, linear, _ = twins(InBatch(torch.ones(C), k))
    hidden, target = data()
    losses = [h(hidden, target, generator=torch.Generator().manual_seed(2)) for h in (head, linear)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    assert head.scorer.encoded == [B + k]


def test_targets_behind_explicit_classes_have_their_scores():
    head, linear, _ = twins(WithExplicit(InBatch(torch.ones(C), 5), torch.arange(3)))
    hidden, target = data()
    losses = [h(hidden, target, generator=torch.Generator().manual_seed(2)) for h in (head, linear)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)


def test_exact_results_equal_those_of_a_linear_head(monkeypatch):
    monkeypatch.setattr(exact, "MAX_SCORES", 4 * B)
    head, linear, _ = twins(Exhaustive(C))
    hidden, target = data()
    assert_close = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # noqa: E731
    assert_close(head.exact_loss(hidden, target), linear.exact_loss(hidden, target))
    assert_close(head.exact_loss(hidden, target), head(hidden, target))
    assert_close(head.log_prob(hidden, target.unsqueeze(1)), linear.log_prob(hidden, target.unsqueeze(1)))
    assert_close(head.log_prob(hidden, torch.arange(C)), linear.log_prob(hidden, torch.arange(C)))
    best, expected = (
        head.topk(hidden, 4, exclude=target.unsqueeze(1)),
        linear.topk(hidden, 4, exclude=target.unsqueeze(1)),
    )
    assert_close(best.log_prob, expected.log_prob)
    assert (best.ids == expected.ids).all()


def test_hidden_can_be_any_input_of_the_scorer():
    table = nn.Embedding(C, C)

    def score(query, ids):
        return table(query)[:, :, 0, :].gather(2, ids.unsqueeze(1).expand(-1, query.shape[1], -1))

    head = ScorerHead(score, Importance(torch.ones(C), 4))
    queries = torch.randint(0, C, (B, 1))
    head(queries, torch.randint(0, C, (B,))).backward()
    assert (table.weight.grad[queries.squeeze(1)] != 0).any()
